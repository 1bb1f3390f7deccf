// Both GEMMs of an expert layer in one launch.  Some blocks fetch rows while others already multiply; results are sent to the source ranks
// while either GEMM runs.
//
// Clusters take tile positions (lagged.h) from a counter, one at a time, so clusters that fetch first take none meanwhile.  Roles in a
// block:
//   tile scheduler   a thread: takes the next position, waits for the tile's inputs, queues the tile,
//   loader           a thread, with e4m3 also a warp for scales: fills the ring (gemm.cuh),
//   widening         with packed weights one or two warpgroups: widen them into the ring (widen.cuh),
//   math warpgroups  multiply, and store the tile: of the first product in local memory, of the second at the source ranks,
//   completion warp  a thread of it: counts stored tiles of the first product, for all blocks,
//   casting warp     where rows have one scale each: casts rows of the first product once all their columns are stored.
// `schedule_tiles` and `complete_tiles` state the memory order between a block that stores a tile and a block that loads it.
#pragma once
#include "../device/grid.cuh"
#include "../gemm/gemm.cuh"
#include "fetch.cuh"
#include "layer.cuh"
#include "tile_queue.cuh"
#include "whole_rows.cuh"

namespace moecomm {

// Store policy that sends rows of the second product to their source ranks.
struct SendRows {
    const LayerArgs& a;

    // Any thread: stores 8 columns of a row at its place in the receive buffer of the source rank.  Unordered until end().
    MOECOMM_FN void store(i32 row, i32 column, const uint4& values) const {
        const u64 to = reinterpret_cast<const u64*>(a.destinations)[row] + static_cast<u64>(column) * 2;
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
                     : "memory");
    }
    // Called by all threads of both math warpgroups, after the last tile; the loader warpgroup runs with fewer registers and takes no part.
    // Each thread's system fence covers its stores; the last block of the grid then signals all source ranks, unless the layer has failed.
    MOECOMM_FN void end() const {
        fence_system();
        barrier_sync(1 + kMathGroups, kMathGroups * kWarpgroup);
        if (threadIdx.x != kWarpgroup || !arrive_last(&own_state(a.ctx)->finished)) return;
        const u32 round = valid_round(a);
        if (round == 0) return;
        fence_system();  // one fence, then relaxed stores: a release store to each rank would take as long as the fence every time
        const u64 masked = own_mask(a.ctx).ranks[0];
        for (i32 p = 0; p < a.ctx.shape.ranks; ++p) {
            const i32 to = is_in(masked, p) ? a.ctx.rank : p, from = is_in(masked, p) ? p : a.ctx.rank;
            store_relaxed(reinterpret_cast<u64*>(a.ctx.peers[to] + received_at(a.ctx, from)), tag_signal(round));
        }
    }
};

// Configuration of the second GEMM of a layer whose first is `c`: only the epilogue and the row order of the weights differ.
MOECOMM_BOTH constexpr GemmConfig second_of(GemmConfig c, Type out) {
    c.gated = c.apart = false;
    c.out = out;
    return c;
}

constexpr i32 kCastPieces = 4;  // of a row, that a lane of a casting warp keeps in registers: those of 2048 columns

// Registers of a thread of the loader warpgroup and of a math warpgroup.
struct Registers {
    i32 loader, math;
};

template <GemmConfig c>
struct ExpertLayerShared {
    GemmShared<c> gemm;
    TileQueue<c> queue;
    FetchShared fetch;
};

// The tile scheduler's waits for a tile's inputs, under the deadline.  On timeout tiles are queued all the same, because other blocks wait
// for them, but no tile of the second product is sent: destinations are unknown until rows have been fetched.  The scheduler that gives up
// sets `failed` before it queues the tile, and so before the tile counts as done; waiters for that tile cannot miss it.
template <RowConfig r>
struct Awaited {
    const ExpertLayerArgs& args;
    i32 full = 0;  // full counters of fetched rows, from the first on
    bool failed = false;

    // Waits for the fetched rows of a tile of the first product, and acquires them.
    MOECOMM_FN void fetched(const Tile& tile) {
        const Arrivals arrivals = arrivals_of<r>(args.layer);
        const i32 wanted = tile.row + tile.rows, before = full;
        while (!failed && full * arrivals.counted < wanted) {
            if (full < arrivals.counters()) {
                failed = !await_more(args.layer, arrivals, full);
            } else {  // a failed dispatch may have left any counts
                store_relaxed(reinterpret_cast<u32*>(args.layer.failed), 1);
                failed = true;
            }
        }
        // Nothing hides the first tile's latency, so one fence acquires all its counters.  Later a fence would also wait for results that
        // this block is sending; acquiring loads do not.
        if (before == 0) {
            fence_gpu();
        } else {
            for (i32 i = before; i < full; ++i) load_acquire(reinterpret_cast<const u32*>(args.layer.fetched) + i);
        }
    }
    // Waits for all column tiles of the first product that a tile of the second reads, and acquires them.
    template <GemmConfig c>
    MOECOMM_FN void tile_done(const Tile& tile) {
        counted(args.layer.tile_done, tile, args.first.grouping.column_tiles * c.cluster);
    }
    // Waits for the rows of a tile of the second product to be cast, and acquires them.
    MOECOMM_FN void cast(const Tile& tile) { counted(args.cast_done, tile, tile.rows); }

  private:
    MOECOMM_FN void counted(const u64& counters, const Tile& tile, i32 wanted) {
        const LayerArgs& a = args.layer;
        const auto all = [&] { return load_fresh(reinterpret_cast<const i32*>(counters) + tile.nth) >= wanted; };
        if (!failed && wait_until(deadline_of(a.ctx), all) != Waited::ok) store_relaxed(reinterpret_cast<u32*>(a.failed), 1);
        load_acquire(reinterpret_cast<const u32*>(counters) + tile.nth);
        failed = failed || load_relaxed(reinterpret_cast<const u32*>(a.failed)) != 0;
    }
};

// The tile scheduler role: one thread.
//
// Order: it acquires a tile's inputs and then arrives at `full`, a release, so roles that wait for `full` see the inputs too.  Tensor
// copies also need a fence between the proxies.  That fence waits for all accesses in flight, so the scheduler executes it, a tile ahead,
// and neither the loader nor the threads that stored the inputs do.
template <GemmConfig c, RowConfig r>
MOECOMM_FN void schedule_tiles(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    const RowTiles rows = TileWalk::count_rows<c.most_rows>(args.first.grouping, s.gemm.counts);
    s.queue.walk = LaggedWalk(args.first.grouping, args.second.grouping, s.gemm.counts, rows, args.lag, args.row_tiles_per_turn);
    Awaited<r> awaited{args};
    for (QueuePlace place;; place.step()) {
        copy_wait(&s.queue.empty[place.slot], place.phase ^ 1);
        QueuedTile& next = s.queue.tiles[place.slot];
        const i32 position = take_position<c>(s.queue.positions, reinterpret_cast<u32*>(args.layer.next_tile), place);
        bool second;
        const bool found = s.queue.walk.find(position, next.tile, second);
        next.product = !found ? QueuedTile::none : second ? QueuedTile::second : QueuedTile::first;
        if (found && second) {
            MOECOMM_LAYER_SPAN(await_tiles, args.layer.ctx, true);
            if constexpr (r.whole) {
                awaited.cast(next.tile);
            } else {
                awaited.template tile_done<c>(next.tile);
            }
        } else if (found) {
            MOECOMM_LAYER_SPAN(await_rows, args.layer.ctx, true);
            awaited.fetched(next.tile);
        }
        next.failed = awaited.failed;
        fence_async();
        arrive(&s.queue.full[place.slot]);
        if (!found) return;
    }
}

// The loader role: one thread.
template <GemmConfig c>
MOECOMM_FN void load_tiles(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    const i32 rank = place_in_cluster<c>();
    LoaderPlace<c> place;
    for_each_tile(s.queue, [&](const QueuedTile& now, const QueuePlace& at) {
        const Tile tile = now.tile;  // a copy in registers: shared memory is not read again for every step
        if (now.product == QueuedTile::first) {
            load_tile<c, c.apart>(s.gemm, args.first, tile, rank, place);
        } else {
            load_tile<c, false>(s.gemm, args.second, tile, rank, place);
        }
        arrive(&s.queue.empty[at.slot]);
    });
}

// The scale loader role: a warp.
//
// Order: the bulk stores that wrote a fetched row's scales complete (bulk_wait, which implies a fence between the proxies), the counting
// warp releases the count, the scheduler acquires it and releases `full`.  This warp then reads through L1, which no acquire of its own has
// invalidated, so L1 must not hold a stale line.  Fetched rows therefore have cache lines of their own (RowConfig::pitch), and scales are
// loaded only for rows of a tile whose rows have all been fetched.  Scales of the first product have lines of their own for each row too,
// and are loaded only after all columns of their row tile are done.
template <GemmConfig c, GemmConfig product>
MOECOMM_FN void load_scales_of_tiles(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    const i32 rank = place_in_cluster<c>();
    RingPlace<c> place;
    for_each_tile(s.queue, [&](const QueuedTile& now, const QueuePlace& at) {
        const Tile tile = now.tile;
        if (now.product == QueuedTile::first) {
            load_scales_of<c, c>(s.gemm, args.first, tile, rank, place);
        } else {
            load_scales_of<c, product>(s.gemm, args.second, tile, rank, place);
        }
        __syncwarp();
        if (lane_id() == 0) arrive(&s.queue.empty[at.slot]);
    });
}

// The widening role: a warp of a widening warpgroup.
template <GemmConfig c>
MOECOMM_FN void widen_tiles(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    GemmShared<c>& gemm = s.gemm;
    WideningPlace<c> place;
    for_each_tile(s.queue, [&](const QueuedTile& now, const QueuePlace& at) {
        if (now.product == QueuedTile::first) {
            const i32 steps = ceil_div(args.first.depth, c.depth());
            widen_tile<c, c.apart>(gemm.ring, gemm.barriers, gemm.scales, gemm.widening, steps, place);
        } else {
            const i32 steps = ceil_div(args.second.depth, c.depth());
            widen_tile<c, false>(gemm.ring, gemm.barriers, gemm.scales, gemm.widening, steps, place);
        }
        __syncwarp();
        if (lane_id() == 0) arrive(&s.queue.empty[at.slot]);
    });
}

// The completion role: one thread of the completion warp.  The math warps' arrivals at `stored` order their stores before this thread,
// whose release at gpu scope (red.release) then covers them.  So the math warps need not wait for their stores.
template <GemmConfig c>
MOECOMM_FN void complete_tiles(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    for_each_tile(s.queue, [&](const QueuedTile& now, const QueuePlace& at) {
        copy_wait(&s.queue.stored[at.slot], at.phase);
        if (now.product == QueuedTile::first) {
            u32* const counter = reinterpret_cast<u32*>(args.layer.tile_done) + now.tile.nth;
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        }
        arrive(&s.queue.empty[at.slot]);
    });
}

// Counts `rows` cast rows of a row tile.  One lane, after a barrier of its warp, whose stores it releases.
MOECOMM_FN void count_cast(const ExpertLayerArgs& args, i32 nth, i32 rows) {
    u32* const counter = reinterpret_cast<u32*>(args.cast_done) + nth;
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(rows) : "memory");
}

// The casting role: a warp.  It takes shares of `cast_rows` rows, in order, each a share ahead.
//
// Order: it acquires all columns of a row tile before it reads rows of it, past L1, and releases cast rows to the schedulers, which acquire
// them.  A row waits only for tiles of the first product, so positions wait for smaller positions alone, as before (lagged.h): a tile of
// the second product waits for rows that come before all rows of later tiles, and warps that run take all shares.  On timeout sets `failed`
// and counts rows as cast all the same, as schedulers do.
template <GemmConfig c, RowConfig r>
MOECOMM_FN void cast_product(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    Grouping row_tiles = args.first.grouping;
    row_tiles.column_tiles = 1;
    TileWalk walk(row_tiles, s.gemm.counts);
    Awaited<r> awaited{args};
    const i32 columns = args.second.depth;
    const auto take = [&] { return lane_id() == 0 ? next_of(reinterpret_cast<u32*>(args.next_cast)) : 0; };
    const auto first_row = [&](i32 share) { return __shfl_sync(kAllLanes, share, 0) * args.cast_rows; };
    Tile tile{};
    i32 tiles = 0;
    for (i32 first = first_row(take());;) {
        const i32 next = take();  // lane 0's, in flight until this share is cast
        i32 begin = first;        // of the rows of this share that are cast and not counted yet
        for (i32 row = first; row < first + args.cast_rows; ++row) {
            if (row >= tile.row + tile.rows) {
                if (row > begin && lane_id() == 0) count_cast(args, tile.nth, row - begin);
                begin = row;
                do {
                    if (!walk.find(tiles++, tile)) return;
                } while (row >= tile.row + tile.rows);
                if (lane_id() == 0) awaited.template tile_done<c>(tile);
                __syncwarp();
            }
            const u8* const from = reinterpret_cast<const u8*>(args.first.out) + static_cast<i64>(row) * columns * bytes_of(c.out);
            cast_whole_row<c.out, row_format(r.integers), kCastPieces, true>(
                from, columns, reinterpret_cast<u8*>(args.cast) + static_cast<i64>(row) * columns,
                reinterpret_cast<float*>(args.second.x_scales) + row);
            __syncwarp();
        }
        if (lane_id() == 0) count_cast(args, tile.nth, first + args.cast_rows - begin);
        first = first_row(next);
    }
}

// Store policy of the first product; its scales have the strides that the second GEMM reads.
template <GemmConfig c>
MOECOMM_FN auto store_between(const ExpertLayerArgs& args) {
    const i32 columns = args.second.depth;
    if constexpr (c.out == Type::e4m3) {
        return StoreCastRows{args.first.out, args.first.out_scales, columns, args.second.x_scale_row};
    } else {
        return StoreRows{args.first.out, columns};
    }
}

// The math role: a warpgroup multiplies queued tiles from the ring and stores them.
template <GemmConfig c, RowConfig r, GemmConfig product>
MOECOMM_FN void make_tiles(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    const i32 math_group = this_math_group();
    const u32 staging = shared_address(s.gemm.staging);
    RingPlace<c> place;
    u32 turns = 0;
    float accum[c.parts()][c.most_rows / 2] = {};
    const u32 mine = staging + math_group * (2 * c.stage_bytes());
    for_each_tile(s.queue, [&](const QueuedTile& now, const QueuePlace& at) {
        if constexpr (c.restarts()) clear(accum);
        ChannelScales<c> scales;
        if constexpr (c.channel_scales) {
            const Tile tile = now.tile;
            const i32 block = block_of<c>(tile, place_in_cluster<c>());
            if (now.product == QueuedTile::first) {
                scales.template load<c>(args.first, tile, block, math_group);
            } else {
                scales.template load<product>(args.second, tile, block, math_group);
            }
        }
        MOECOMM_LAYER_SPAN(gemm_1, args.layer.ctx, threadIdx.x == kWarpgroup && now.product == QueuedTile::first);
        MOECOMM_LAYER_SPAN(gemm_2, args.layer.ctx, threadIdx.x == kWarpgroup && now.product == QueuedTile::second);
        const i32 depth = now.product == QueuedTile::first ? args.first.depth : args.second.depth;
        multiply_padded<c>(s.gemm, place, math_group, ceil_div(depth, c.depth()), now.tile.padded, accum);
        const Tile tile = now.tile;  // a copy: the compiler would read shared memory again after every store
        scales.apply(accum[0], tile, mine, 1 + math_group, turns);
        if (now.product == QueuedTile::first) {
            if constexpr (c.finishes()) finish<c>(accum, args.first, tile, block_of<c>(tile, place_in_cluster<c>()), math_group);
            store_accum<c>(accum, tile, math_group, args.second.depth, staging, turns, store_between<c>(args));
            // store_cast reads the staging of both warpgroups; the second product's epilogue overwrites each with a barrier of its own
            // warpgroup alone.
            if constexpr (c.swapped && c.out == Type::e4m3) barrier_sync(1 + kMathGroups, kMathGroups * kWarpgroup);
        } else if (!now.failed) {
            MOECOMM_LAYER_SPAN(send_results, args.layer.ctx, threadIdx.x == kWarpgroup);
            // Destinations are read through L1, too.  A cache line of them belongs to rows of one counter, all of which were fetched before
            // any of them was multiplied, so L1 holds no stale line.
            static_assert(r.counted * sizeof(u64) % 128 == 0, "whole lines");
            if constexpr (product.finishes())
                finish<product>(accum, args.second, tile, block_of<product>(tile, place_in_cluster<product>()), math_group);
            store_accum<product>(accum, tile, math_group, args.second.columns, staging, turns, SendRows{args.layer});
        }
        __syncwarp();
        if (lane_id() == 0) arrive(&s.queue.stored[at.slot]);
    });
}

// The kernel, launched with whole clusters: computes both GEMMs of this rank's experts on rows of c.type and sends results of type `out` to
// the source ranks.  All waits have the deadline; on failure no source rank is signaled, and reduce_layer reports the error.
template <GemmConfig c, RowConfig r, Type out>
MOECOMM_FN void expert_layer(const ExpertLayerArgs& args) {
    static_assert(r.type == c.type && r.whole == c.channel_scales && r.integers == c.integers, "rows are multiplied as they come");
    static_assert(sizeof(ExpertLayerShared<c>) <= expert_layer_shared_bytes(c.scaled(), c.most_rows, c.stages, c.packed_stages),
                  "what is launched");
    extern __shared__ __align__(1024) u8 memory[];
    auto& s = *reinterpret_cast<ExpertLayerShared<c>*>(memory);
    if (threadIdx.x == 0) {
        prefetch_map(args.first.w);
        prefetch_map(args.second.w);
        for (const TensorMap& map : args.first.x) prefetch_map(map);
        for (const TensorMap& map : args.second.x) prefetch_map(map);
        s.fetch.init();
        s.gemm.init();
        s.queue.init();
        barrier_init_done();
    }
    __syncthreads();
    await_earlier_kernels();
    // Read by the math warpgroups, whose warps fetch nothing in most blocks.
    const auto* counts = reinterpret_cast<const i32*>(args.first.counts);
    for (i32 g = threadIdx.x - kWarpgroup; g >= 0 && g < args.first.grouping.groups; g += c.threads() - kWarpgroup)
        s.gemm.counts[g] = counts[g];
    fetch_rows<r, GemmShared<c>::room(), c.threads()>(args.layer, s.fetch, memory, args.fetchers, args.together);
    if (blockIdx.x == 0 && threadIdx.x == 0) note_failure(args.layer);
    launch_dependents();
    if constexpr (c.cluster > 1) sync_cluster<c.cluster>();
    constexpr GemmConfig product = second_of(c, out);
    constexpr Registers registers = r.whole ? Registers{88, 208} : Registers{c.loader_registers(), c.math_registers()};
    static_assert((registers.loader + c.widening_groups() * c.widening_registers() + kMathGroups * registers.math) * kWarpgroup <=
                      c.launched_registers(),
                  "what setmaxnreg may move");
    if (threadIdx.x < kWarpgroup) {
        reg_dealloc<registers.loader>();
        if (threadIdx.x == 0) load_tiles(s, args);
        if (threadIdx.x == kWarp) schedule_tiles<c, r>(s, args);
        if constexpr (r.whole) {
            if (warp_id() == 2) cast_product<c, r>(s, args);
        }
        if constexpr (c.scaled()) {
            if (warp_id() == 2) load_scales_of_tiles<c, product>(s, args);
        }
        if (threadIdx.x == 3 * kWarp) complete_tiles(s, args);
    } else if (c.widens() && threadIdx.x >= kGemmThreads) {
        reg_dealloc<c.widening_registers()>();
        if constexpr (c.widens()) widen_tiles(s, args);
    } else {
        reg_alloc<registers.math>();
        make_tiles<c, r, product>(s, args);
        SendRows{args.layer}.end();
    }
    if constexpr (c.cluster > 1) sync_cluster<c.cluster>();  // a block must not exit while peers load or arrive in its shared memory
}

}  // namespace moecomm
