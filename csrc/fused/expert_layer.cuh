// Both GEMMs of a layer in one launch: rows are fetched while the first has begun, and sent back while either is under way.
//
// Positions of tiles (lagged.h) are taken from a counter, by whole clusters, as they get to them: those that fetch before they multiply
// take none meanwhile.  So are the first rows that are fetched.  In a block
//   the tile scheduler  a thread: finds the next tile, waits for what it is made of, and puts it into the queue of the others,
//   the loader          a thread, of e4m3 and a warp for scales: fill the ring (gemm.cuh),
//   warpgroups          empty it, and store the tile: of the first product here, of the second at its source rank,
//   completion          a thread: counts, for all blocks, that the tile has been stored.
// What somebody stores here and somebody else loads: see `schedule_tiles` and `complete_tiles`.
#pragma once
#include "../gemm/gemm.cuh"
#include "fetch.cuh"
#include "send.cuh"
#include "tile_queue.cuh"

namespace moecomm {

// The second GEMM of a layer whose first is `c`.  All but the epilogue, and how weights lie in memory, is the same.
MOECOMM_BOTH constexpr GemmConfig second_of(GemmConfig c, Type out) {
    c.swiglu = c.apart = false;
    c.out = out;
    return c;
}

template <GemmConfig c>
struct ExpertLayerShared {
    GemmShared<c> gemm;
    TileQueue<c> queue;
    FetchShared fetch;
};

// By the tile scheduler: what a tile is made of.  Where that does not come in time, tiles are queued all the same, since others wait for
// them, but none of the second product is sent: where its rows go is not known before they have been fetched.  Who gives up sets `failed`
// before it queues a tile, and so before the tile counts as done: who waits for it can't miss it.
template <RowConfig r>
struct Awaited {
    const ExpertLayerArgs& args;
    i32 full = 0;  // of the counters of fetched rows
    bool failed = false;

    MOECOMM_FN void fetched(const Tile& tile) {
        const Arrivals arrivals = arrivals_of<r>(args.layer);
        const i32 wanted = tile.row + tile.rows, before = full;
        while (!failed && full * arrivals.counted < wanted) {
            if (full < arrivals.counters()) {
                failed = !await_more(args.layer, arrivals, full);
            } else {  // a dispatch that has failed may have left any counts
                store_relaxed(reinterpret_cast<u32*>(args.layer.failed), 1);
                failed = true;
            }
        }
        // Those of the first tile, which nothing hides, together.  Later a fence would be one for rows on their way back as well.
        if (before == 0) {
            fence_gpu();
        } else {
            for (i32 i = before; i < full; ++i) load_acquire(reinterpret_cast<const u32*>(args.layer.fetched) + i);
        }
    }
    template <GemmConfig c>
    MOECOMM_FN void tile_done(const Tile& tile) {
        const LayerArgs& a = args.layer;
        const i32 wanted = args.first.grouping.column_tiles * c.cluster;
        const auto all = [&] { return load_fresh(reinterpret_cast<const i32*>(a.tile_done) + tile.nth) >= wanted; };
        if (!failed && wait_until(deadline_of(a.ctx), all) != Waited::ok) store_relaxed(reinterpret_cast<u32*>(a.failed), 1);
        load_acquire(reinterpret_cast<const u32*>(a.tile_done) + tile.nth);
        failed = failed || load_relaxed(reinterpret_cast<const u32*>(a.failed)) != 0;
    }
};

// One thread: the tile scheduler.  It has seen complete, with acquires, what a tile is made of, and its arrival at `full` is a release: so
// have the others of the block, through their wait.  Copies of theirs take a fence between the proxies as well, which is one for all that
// is on its way, and takes as long: the scheduler's, which is a tile ahead, and neither theirs nor that of the threads that stored.
template <GemmConfig c, RowConfig r>
MOECOMM_FN void schedule_tiles(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    const RowTiles rows = TileWalk::count_rows<c.most_rows>(args.first.grouping, s.gemm.counts);
    s.queue.walk = LaggedWalk(args.first.grouping, args.second.grouping, s.gemm.counts, rows, args.lag, args.rotation_step);
    Awaited<r> awaited{args};
    for (QueuePlace place;; place.step()) {
        copy_wait(&s.queue.empty[place.slot], place.phase ^ 1);
        QueuedTile& next = s.queue.tiles[place.slot];
        const i32 position = take_next_tile(s.queue, reinterpret_cast<u32*>(args.layer.next_tile), place);
        bool second;
        const bool found = s.queue.walk.find(position, next.tile, second);
        next.product = !found ? QueuedTile::none : second ? QueuedTile::second : QueuedTile::first;
        if (found && second) {
            awaited.template tile_done<c>(next.tile);
        } else if (found) {
            awaited.fetched(next.tile);
        }
        next.failed = awaited.failed;
        fence_async();
        arrive(&s.queue.full[place.slot]);
        if (!found) return;
    }
}

// One thread: the loader.
template <GemmConfig c>
MOECOMM_FN void load_tiles(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    const i32 rank = place_in_cluster<c>();
    RingPlace<c> place;
    for_each_tile(s.queue, [&](const QueuedTile& now, const QueuePlace& at) {
        const Tile tile = now.tile;  // once: not again for every step
        if (now.product == QueuedTile::first) {
            load_tile<c, c.apart>(s.gemm, args.first, tile, rank, place);
        } else {
            load_tile<c, false>(s.gemm, args.second, tile, rank, place);
        }
        arrive(&s.queue.empty[at.slot]);
    });
}

// A warp.  Scales of fetched rows are behind the bulk stores that brought them by way of their completion (bulk_wait, which ends in a fence
// between the proxies), the release that counts them, the scheduler's acquire and its release at `full`.  They come through the first-level
// cache, which nobody empties for the thread that loads: no line of it may be there from before.  So fetched rows have lines of their own
// (RowConfig::pitch), and nobody loads scales of a row that is not in a tile that is there.  Those of the first product have lines of their
// own for every row as well, and nobody loads any of a row before all columns of its row tile are done.
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

// One thread: completion.  What the warpgroups have stored it has seen complete through their arrivals at `stored`; its own release covers
// that.  They need not wait for it.
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

// Where the first product goes: scales of its rows as far apart as the second GEMM wants them.
template <GemmConfig c>
MOECOMM_FN auto store_between(const ExpertLayerArgs& args) {
    const i32 columns = args.second.depth;
    if constexpr (c.out == Type::e4m3) {
        return StoreCastRows{args.first.out, args.first.out_scales, columns, args.second.x_scale_row};
    } else {
        return StoreRows{args.first.out, columns};
    }
}

// A warpgroup: empties the ring, and stores the tiles.
template <GemmConfig c, RowConfig r, GemmConfig product>
MOECOMM_FN void make_tiles(ExpertLayerShared<c>& s, const ExpertLayerArgs& args) {
    const i32 math_group = threadIdx.x / kWarpgroup - 1;
    const u32 staging = shared_address(s.gemm.staging);
    RingPlace<c> place;
    u32 turns = 0;
    float accum[c.parts()][c.most_rows / 2] = {};
    for_each_tile(s.queue, [&](const QueuedTile& now, const QueuePlace& at) {
        const i32 depth = now.product == QueuedTile::first ? args.first.depth : args.second.depth;
        multiply_padded<c>(s.gemm, place, math_group, ceil_div(depth, c.depth()), now.tile.padded, accum);
        const Tile tile = now.tile;  // once: nothing is kept in registers across a store
        if (now.product == QueuedTile::first) {
            store_accum<c>(accum, tile, math_group, args.second.depth, staging, turns, store_between<c>(args));
            // Both warpgroups cast what either has turned; the second product they turn each for itself, and in the same places.
            if constexpr (c.swapped && c.out == Type::e4m3) barrier_sync(1 + kMathGroups, kMathGroups * kWarpgroup);
        } else if (!now.failed) {
            // Where a row goes is read through the first-level cache as well.  A line of that belongs to rows of one counter, all of which
            // had been fetched before any of them was multiplied.
            static_assert(r.counted * sizeof(u64) % 128 == 0, "whole lines");
            store_accum<product>(accum, tile, math_group, args.second.columns, staging, turns, SendRows{args.layer});
        }
        __syncwarp();
        if (lane_id() == 0) arrive(&s.queue.stored[at.slot]);
    });
}

// A launch of whole clusters: what our experts make of the rows that they get, of c.type, sent to their source ranks as `out`.
template <GemmConfig c, RowConfig r, Type out>
MOECOMM_FN void expert_layer(const ExpertLayerArgs& args) {
    static_assert(r.type == c.type, "rows are multiplied as they come");
    static_assert(sizeof(ExpertLayerShared<c>) <= expert_layer_shared_bytes(c.scaled(), c.most_rows, c.stages), "what is launched");
    extern __shared__ __align__(1024) u8 memory[];
    auto& s = *reinterpret_cast<ExpertLayerShared<c>*>(memory);
    if (threadIdx.x == 0) {
        prefetch_map(args.first.w);
        prefetch_map(args.second.w);
        for (const TensorMap& map : args.first.x) prefetch_map(map);
        for (const TensorMap& map : args.second.x) prefetch_map(map);
        s.fetch.init();
        s.gemm.barriers.init();
        s.queue.init();
        barrier_init_done();
    }
    __syncthreads();
    await_earlier_kernels();
    // By warps that do not fetch in most blocks.
    const auto* counts = reinterpret_cast<const i32*>(args.first.counts);
    for (i32 g = threadIdx.x - kWarpgroup; g >= 0 && g < args.first.grouping.groups; g += kMathGroups * kWarpgroup)
        s.gemm.counts[g] = counts[g];
    fetch_rows<r, GemmShared<c>::room()>(args.layer, s.fetch, memory, args.fetchers, args.together);
    if (blockIdx.x == 0 && threadIdx.x == 0) note_failure(args.layer);
    let_next_kernel_launch();
    if constexpr (c.cluster > 1) sync_cluster<c.cluster>();
    constexpr GemmConfig product = second_of(c, out);
    if (threadIdx.x < kWarpgroup) {
        leave_registers<kLoaderRegisters>();
        if (threadIdx.x == 0) load_tiles(s, args);
        if (threadIdx.x == kWarp) schedule_tiles<c, r>(s, args);
        if constexpr (c.scaled()) {
            if (warp_id() == 2) load_scales_of_tiles<c, product>(s, args);
        }
        if (threadIdx.x == 3 * kWarp) complete_tiles(s, args);
    } else {
        take_registers<kMathRegisters>();
        make_tiles<c, r, product>(s, args);
        SendRows{args.layer}.end();
    }
    if constexpr (c.cluster > 1) sync_cluster<c.cluster>();  // what others load for us, and their arrivals, must find us here
}

}  // namespace moecomm
