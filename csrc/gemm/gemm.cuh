// A grouped GEMM: out[r] = w[g] x[r] for the rows r of each group g, on Hopper's tensor cores.
//
// Operands are swapped: the weights are operand A of wgmma, 128 rows a block, and the rows of x are its N dimension, 16 to 256 a tile, so
// that a group of few rows costs little.  A block has a loader warpgroup (one thread of it loads) and two math warpgroups, which multiply
// 64 rows of w each.  FP8 keeps two accumulators (scaled.cuh): a block then has 256 rows of w, a warpgroup multiplies two times 64 of them
// in sequence, and tiles have at most 128 rows.  FP8 tiles of many rows use x as operand A instead (scaled_rows.cuh).  With packed weights
// beside FP8 rows, one or two more warpgroups widen them into the ring (widen.cuh).
//
// The kernel is persistent: each cluster takes every (gridDim / cluster)-th tile (tiles.h), or the next one of a counter
// (tile_counter.cuh).  The blocks of a cluster multiply the same row tile with neighboring columns; each loads its part of x into all of
// them.
#pragma once
#include "../device/launch.cuh"
#include "epilogue.cuh"
#include "epilogue_cast.cuh"
#include "epilogue_rows.cuh"
#include "finish.cuh"
#include "mxfp4.cuh"
#include "scaled.cuh"
#include "scaled_rows.cuh"
#include "tile_counter.cuh"
#include "widen.cuh"

namespace moecomm {

template <GemmConfig c>
struct GemmShared {
    Ring<c> ring;
    u8 staging[kMathGroups][2 * c.stage_bytes()];
    RingBarriers<c> barriers;
    i32 counts[kMostGroups];
    RingScales<c> scales;
    IndexQueue<c> queue;
    Widening<c> widening;

    // One thread; barrier_init_done() and a block or cluster barrier must follow.
    MOECOMM_FN void init() {
        barriers.init();
        queue.init();
        widening.init();
    }
    // Bytes from the beginning that are unused until the first tile is loaded: the fused kernel fetches rows through them.
    MOECOMM_BOTH static constexpr i32 room() { return sizeof(ring) + sizeof(staging); }
};

// Returns which of the math warpgroups this is. They follow the loader warpgroup.  Called once, before the loop over tiles.  Descriptors
// are then computed in uniform registers, as long as that loop and what it calls branch on no value of a lane
// (docs/maintainers/decisions.md).
MOECOMM_FN i32 this_math_group() { return static_cast<i32>(uniform(threadIdx.x / kWarpgroup)) - 1; }

template <GemmConfig c>
MOECOMM_FN i32 place_in_cluster() {
    return c.cluster == 1 ? 0 : cluster_rank();
}

// The tiles of this block's cluster, for one role.  Constants are read again where they are needed: registers are scarce.  `warp`: the role
// is a whole warp, not one thread.
template <GemmConfig c, bool warp = true, bool = c.dynamic, bool = c.widens()>
struct MyTiles {
    TileWalk walk;
    i32 next;

    MOECOMM_FN MyTiles(const GemmArgs& args, GemmShared<c>& s) : walk(args.grouping, s.counts), next(blockIdx.x / c.cluster) {}
    MOECOMM_FN bool find(Tile& tile) { return walk.find(next, tile); }
    MOECOMM_FN void find_again(Tile&) const {}
    MOECOMM_FN void step() { next += static_cast<i32>(gridDim.x) / c.cluster; }
};
template <GemmConfig c, bool warp>
struct MyTiles<c, warp, true, false> {
    TileWalk walk;
    IndexQueue<c>& queue;
    QueuePlace place;

    MOECOMM_FN MyTiles(const GemmArgs& args, GemmShared<c>& s) : walk(args.grouping, s.counts), queue(s.queue) {}
    // Waits for the next index (no deadline: the tile scheduler waits for these roles alone, of either block of a pair).
    MOECOMM_FN bool find(Tile& tile) {
        copy_wait(&queue.full[place.slot], place.phase);
        return walk.find(queue.indices[place.slot], tile);
    }
    MOECOMM_FN void find_again(Tile&) const {}
    // Called once the role is done with the tile, not with the index alone: Positions relies on it.
    MOECOMM_FN void step() {
        if constexpr (warp) __syncwarp();
        if (!warp || lane_id() == 0) arrive(&queue.empty[place.slot]);
        place.step();
    }
};

template <GemmConfig c, bool warp, bool dynamic>
struct MyTiles<c, warp, dynamic, true> {
    IndexQueue<c>& queue;
    QueuePlace place;

    MOECOMM_FN MyTiles(const GemmArgs&, GemmShared<c>& s) : queue(s.queue) {}
    // Waits for the next tile, as above.
    MOECOMM_FN bool find(Tile& tile) {
        copy_wait(&queue.full[place.slot], place.phase);
        tile = queue.tiles[place.slot];
        return tile.rows > 0;
    }
    // Reads the tile that find() has found from shared memory, so that no register holds it meanwhile.
    MOECOMM_FN void find_again(Tile& tile) const { tile = queue.tiles[place.slot]; }
    MOECOMM_FN void step() {
        if constexpr (warp) __syncwarp();
        if (!warp || lane_id() == 0) arrive(&queue.empty[place.slot]);
        place.step();
    }
};

// The tile scheduler role: one thread.  Takes tiles for all roles of the block, until there are no more.
template <GemmConfig c>
MOECOMM_FN void schedule_tiles(GemmShared<c>& s, const GemmArgs& args) {
    TileWalk walk(args.grouping, s.counts);
    Tile tile;
    for (QueuePlace place;; place.step()) {
        copy_wait(&s.queue.empty[place.slot], place.phase ^ 1);
        const i32 index = take_position<c>(s.queue.positions, reinterpret_cast<u32*>(args.next_tile), place);
        s.queue.indices[place.slot] = index;
        arrive(&s.queue.full[place.slot]);
        if (!walk.find(index, tile)) return;
    }
}
// The tile scheduler role where the queue holds tiles, not indices.
template <GemmConfig c>
MOECOMM_FN void queue_tiles(GemmShared<c>& s, const GemmArgs& args) {
    TileWalk walk(args.grouping, s.counts);
    Tile tile{};
    i32 index = blockIdx.x / c.cluster;
    for (QueuePlace place;; place.step()) {
        copy_wait(&s.queue.empty[place.slot], place.phase ^ 1);
        if constexpr (c.dynamic) index = take_position<c>(s.queue.positions, reinterpret_cast<u32*>(args.next_tile), place);
        const bool found = walk.find(index, tile);
        if (!found) tile.rows = 0;
        s.queue.tiles[place.slot] = tile;
        arrive(&s.queue.full[place.slot]);
        if (!found) return;
        index += static_cast<i32>(gridDim.x) / c.cluster;
    }
}

// Index of this block's columns, in units of block_columns().
template <GemmConfig c>
MOECOMM_FN i32 block_of(const Tile& tile, i32 rank) {
    return tile.column * c.cluster + rank;
}

// Loads the part of w of one step into its slot, and announces the bytes of the slot. Called by the loader thread. `apart`:
// GemmConfig::apart of the tile's product.
template <GemmConfig c, bool apart>
MOECOMM_FN void load_weights(GemmShared<c>& s, const GemmArgs& args, const Tile& tile, i32 rank, i32 k, i32 slot) {
    const i32 column = block_of<c>(tile, rank) * c.block_columns();
    u64* full = &s.barriers.full[slot];
    expect_bytes(full, c.weight_bytes() + c.boxes() * tile.padded * kSlotRowBytes);
    const u64 keep = tile.only_row_tile ? kKeepLeast : kKeepNormal;
    const u32 w = shared_address(s.ring.w[slot]);
    if constexpr (c.mxfp4) k /= 2;  // bytes of two columns
    if constexpr (apart) {
        load_pairs(w, args.w, k, column / (2 * kWoven), tile.group, full, keep);
    } else {
        load_box(w, args.w, k, column, tile.group, full, keep);
    }
}
// Loads this block's part of the rows of one step into all blocks of the cluster. Called by the loader thread. `x`: kRowMaps maps.
template <GemmConfig c>
MOECOMM_FN void load_rows(GemmShared<c>& s, const TensorMap* x, const Tile& tile, i32 rank, i32 k, i32 slot) {
    const i32 part = tile.padded / c.cluster;
    u32 to = shared_address(s.ring.x[slot]) + rank * part * kSlotRowBytes;
    i32 row = tile.row + rank * part;
#pragma unroll
    for (i32 i = kRowMaps - 1; i >= 0; --i) {
        const i32 box = c.least_box() << i;
        if (box * c.cluster > c.most_rows || (part & box) == 0) continue;
        load_box_for_all<c.cluster>(to, x[i], k, row, &s.barriers.full[slot], kKeepNormal);
        if constexpr (c.boxes() > 1)
            load_box_for_all<c.cluster>(to + c.box_bytes(), x[i], k + kSlotRowBytes / bytes_of(c.type), row, &s.barriers.full[slot],
                                        kKeepNormal);
        to += box * kSlotRowBytes;
        row += box;
    }
}

// The loader thread's position: packed weights have a ring of their own.
template <GemmConfig c>
using LoaderPlace = Place<c.widens() ? c.packed_stages : c.stages>;

// Loads a tile into the ring, slot after slot.  Called by the loader thread.  Each slot is loaded after its `empty` barrier completes (all
// warps of the cluster have released it) and completes `full`.  Of packed weights it loads these alone, as far ahead as their ring goes,
// and the warp that loads scales loads the rows.  Cannot fail.
template <GemmConfig c, bool apart>
MOECOMM_FN void load_tile(GemmShared<c>& s, const GemmArgs& args, const Tile& tile, i32 rank, LoaderPlace<c>& place) {
    if constexpr (c.widens()) {
        load_packed<c, apart>(s.ring, s.widening, args, tile, block_of<c>(tile, rank), place);
    } else {
        for (i32 k = 0; k < args.depth; k += c.depth(), place.step()) {
            copy_wait(&s.barriers.empty[place.slot], place.phase ^ 1);
            load_weights<c, apart>(s, args, tile, rank, k, place.slot);
            load_rows<c>(s, args.x, tile, rank, k, place.slot);
        }
    }
}

// The loader role: one thread.
template <GemmConfig c>
MOECOMM_FN void load_tiles(GemmShared<c>& s, const GemmArgs& args) {
    const i32 rank = place_in_cluster<c>();
    LoaderPlace<c> place;
    MyTiles<c, false> tiles(args, s);
    for (Tile tile; tiles.find(tile); tiles.step()) {
        load_tile<c, c.apart>(s, args, tile, rank, place);
    }
}

// Where a lane finds the scales of a tile, step after step.  `product`: configuration of the tile's product.  Empty for types without
// scales.
template <GemmConfig product, bool = product.scaled(), bool = product.mxfp4>
struct TileScales {
    MOECOMM_FN TileScales(const GemmArgs&, const Tile&, i32, u64) {}
    template <GemmConfig c>
    MOECOMM_FN void load(GemmShared<c>&, const GemmArgs&, const Tile&, i32) {}
};
template <GemmConfig product>
struct TileScales<product, true, false> {
    const float *of_w, *of_x;

    // `x_scales`: those of the row that the tile counts its rows from.
    MOECOMM_FN TileScales(const GemmArgs& args, const Tile& tile, i32 rank, u64 x_scales)
        : of_w(scales_of_w<product>(args, tile.group, block_of<product>(tile, rank), lane_id() % kWeightScales)),
          of_x(reinterpret_cast<const float*>(x_scales)) {}

    // Loads the scales of the next step into its slot, which is empty.  A whole warp; each lane arrives at `full` once its copies are
    // written.  Cannot fail.  Padding rows, which are multiplied and not stored, take the scale of the tile's last row: scales of rows
    // outside of the tile may not have arrived yet.
    template <GemmConfig c>
    MOECOMM_FN void load(GemmShared<c>& s, const GemmArgs& args, const Tile& tile, i32 slot) {
        const i32 lane = lane_id();
        const SlotScales to = s.scales.slot(slot);
        if (!product.widens() && lane < kWeightScales) load_scale(to.of_w(lane), of_w);
#pragma unroll
        for (i32 i = lane; i < product.most_rows; i += kWarp)
            if (i < tile.padded) load_scale(to.of_x(i), of_x + (tile.row + min(i, tile.rows - 1)) * args.x_scale_row);
        arrive_when_loaded(&s.barriers.full[slot]);
        ++of_w;
        of_x += args.x_scale_column;
    }
};

// With packed weights beside bf16.
template <GemmConfig product>
struct TileScales<product, false, true> {
    PackedWalk<product> walk;

    MOECOMM_FN TileScales(const GemmArgs& args, const Tile& tile, i32 rank, u64) : walk(args, tile.group, block_of<product>(tile, rank)) {}
    // Loads the scales of the next step into its slot, as above.
    template <GemmConfig c>
    MOECOMM_FN void load(GemmShared<c>& s, const GemmArgs&, const Tile&, i32 slot) {
        walk.load(s.scales.slot(slot));
        arrive_when_loaded(&s.barriers.full[slot]);
    }
};

// Loads the scales of a tile into the ring, beside packed weights also its rows.  Called by a whole warp, which waits for `empty` as the
// loader does.  Cannot fail.
template <GemmConfig c, GemmConfig product>
MOECOMM_FN void load_scales_of(GemmShared<c>& s, const GemmArgs& args, const Tile& tile, i32 rank, RingPlace<c>& place) {
    TileScales<product> scales(args, tile, rank, args.x_scales);
    for (i32 k = 0; k < args.depth; k += c.depth(), place.step()) {
        copy_wait(&s.barriers.empty[place.slot], place.phase ^ 1);
        if (c.widens() && lane_id() == 0) {
            expect_bytes(&s.barriers.full[place.slot], tile.padded * kSlotRowBytes);
            load_rows<c>(s, args.x, tile, rank, k, place.slot);
        }
        scales.load(s, args, tile, place.slot);
    }
}

// Steps of the depth; with scales, from 0 on.
struct Steps {
    i32 first, end;
};
template <GemmConfig c>
MOECOMM_FN Steps all_steps(const GemmArgs& args) {
    return {0, ceil_div(args.depth, c.depth())};
}

// Loads steps of a tile, and its scales, into the ring.  Called by a whole warp, of which lane 0 loads rows and weights.  Cannot fail.
// `x`: maps of the rows; `x_scales`: see TileScales.
template <GemmConfig c>
MOECOMM_FN void load_tile_and_scales(GemmShared<c>& s, const GemmArgs& args, const TensorMap* x, u64 x_scales, const Tile& tile, i32 rank,
                                     const Steps& steps, RingPlace<c>& place) {
    if (!c.scaled() && lane_id() != 0) return;
    TileScales<c> scales(args, tile, rank, x_scales);
    for (i32 step = steps.first; step < steps.end; ++step, place.step()) {
        copy_wait(&s.barriers.empty[place.slot], place.phase ^ 1);
        if (lane_id() == 0) {
            load_weights<c, false>(s, args, tile, rank, step * c.depth(), place.slot);
            load_rows<c>(s, x, tile, rank, step * c.depth(), place.slot);
        }
        scales.load(s, args, tile, place.slot);
    }
}

// The scale loader role: a warp.
template <GemmConfig c>
MOECOMM_FN void load_scales(GemmShared<c>& s, const GemmArgs& args) {
    const i32 rank = place_in_cluster<c>();
    RingPlace<c> place;
    MyTiles<c> tiles(args, s);
    for (Tile tile; tiles.find(tile); tiles.step()) {
        load_scales_of<c, c>(s, args, tile, rank, place);
    }
}

// The widening role: a warp of a widening warpgroup.
template <GemmConfig c>
MOECOMM_FN void widen_tiles(GemmShared<c>& s, const GemmArgs& args) {
    const i32 steps = ceil_div(args.depth, c.depth());
    WideningPlace<c> place;
    MyTiles<c> tiles(args, s);
    for (Tile tile; tiles.find(tile); tiles.step()) {  // all tiles are as deep
        widen_tile<c, c.apart>(s.ring, s.barriers, s.scales, s.widening, steps, place);
    }
}

// Sets accumulators to 0.
template <i32 parts, i32 size>
MOECOMM_FN void clear(float (&accum)[parts][size]) {
#pragma unroll
    for (i32 part = 0; part < parts; ++part)
#pragma unroll
        for (i32 i = 0; i < size; ++i) accum[part][i] = 0.0f;
}

// Multiplies 64 rows of w by n rows of x over the whole depth.  Called by a math warpgroup.  Each step waits for `full`; one step's wgmma
// stays in flight while the slot of the step before is released.  Cannot fail.
template <GemmConfig c, i32 n, i32 size>
MOECOMM_FN void multiply(GemmShared<c>& s, RingPlace<c>& place, i32 math_group, i32 steps, float (&accum)[size]) {
    const u32 w = operand_at(shared_address(s.ring.w[0]) + math_group * (c.weight_bytes() / kMathGroups));
    const u32 x = operand_at(shared_address(s.ring.x[0]));
    i32 sums[c.integers ? n / 2 : 1] = {};
    i32 before = 0;
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        copy_wait(&s.barriers.full[place.slot], place.phase);
        wgmma_begin();
        const u32 w_slot = w + place.slot * (c.weight_bytes() / 16), x_slot = x + place.slot * (c.row_bytes() / 16);
#pragma unroll
        for (i32 k = 0; k < kSlotRowBytes / 32; ++k) {
            if constexpr (c.integers) {
                wgmma_integers<n>(sums, operand(w_slot + 2 * k), operand(x_slot + 2 * k), k > 0 ? 1 : step);
            } else {
                wgmma<c.type, n>(accum, operand(w_slot + 2 * k), operand(x_slot + 2 * k), k > 0 ? 1 : step);
            }
        }
        wgmma_commit();
        if (step > 0) {
            wgmma_wait<1>();
            release_slot<c>(s.barriers, before);
        }
        before = place.slot;
        place.step();
    }
    wgmma_wait<0>();
    release_slot<c>(s.barriers, before);
    if constexpr (c.integers) {
        pin_integers(sums);
#pragma unroll
        for (i32 i = 0; i < n / 2; ++i) accum[i] = __int2float_rn(sums[i]);
    } else if constexpr (c.restarts()) {
        pin_registers(accum);
    }
}
// Multiplies all parts of a tile, with the instance whose n is `padded`.  Called by a math warpgroup; `accum` is complete on return.
template <GemmConfig c, i32 n = c.most_rows, i32 size>
MOECOMM_FN void multiply_padded(GemmShared<c>& s, RingPlace<c>& place, i32 math_group, i32 steps, i32 padded,
                                float (&accum)[c.parts()][size]) {
    if constexpr (!c.swapped) {
        multiply_rows<c>(s.ring, s.barriers, s.scales, place, math_group, steps, padded, accum);
    } else if (n > c.row_unit && padded != n) {
        if constexpr (n > c.row_unit) multiply_padded<c, n - c.row_unit>(s, place, math_group, steps, padded, accum);
    } else if constexpr (c.scaled()) {
        multiply_scaled<c, n>(s.ring, s.barriers, s.scales, place, math_group, steps, accum);
    } else {
        multiply<c, n>(s, place, math_group, steps, accum[0]);
    }
}

// Stores a math warpgroup's share of a tile through `out`.  Both math warpgroups call it; they meet at named barriers where they share
// rows. Orders nothing beyond the block.  `staging`: the first warpgroup's buffers; the second's follow.
template <GemmConfig product, class Out, i32 size>
MOECOMM_FN void store_accum(const float (&accum)[product.parts()][size], const Tile& tile, i32 math_group, i32 columns, u32 staging,
                            u32& turns, const Out& out) {
    const i32 block = block_of<product>(tile, place_in_cluster<product>());
    if constexpr (!product.swapped) {
        store_rows<product>(accum, tile, block, columns, staging, math_group, out);
    } else if constexpr (product.out == Type::e4m3) {
        store_cast<product>(accum, tile, block, columns, staging, math_group, turns, out);
    } else {
        store_parts<product>(accum, tile, block * kMathGroups + math_group, columns, staging + math_group * (2 * product.stage_bytes()),
                             1 + math_group, turns, out);
    }
}

// The math role: a warpgroup multiplies tiles from the ring and stores them.
template <GemmConfig c, class Out>
MOECOMM_FN void make_tiles(GemmShared<c>& s, const GemmArgs& args, const Out& out) {
    const i32 math_group = this_math_group();
    const i32 steps = ceil_div(args.depth, c.depth()), columns = c.gated ? args.columns / 2 : args.columns;
    RingPlace<c> place;
    u32 turns = 0;
    float accum[c.parts()][c.most_rows / 2] = {};
    MyTiles<c> tiles(args, s);
    for (Tile tile; tiles.find(tile); tiles.step()) {
        if constexpr (c.restarts()) clear(accum);
        ChannelScales<c> scales;
        scales.template load<c>(args, tile, block_of<c>(tile, place_in_cluster<c>()), math_group);
        if constexpr (c.mxfp4) {
            const PackedTile<c> packed(args, tile.group, block_of<c>(tile, place_in_cluster<c>()), math_group);
            multiply_packed<c>(s.ring, s.barriers, s.scales, place, packed, steps, tile.padded, accum[0]);
        } else {
            multiply_padded<c>(s, place, math_group, steps, tile.padded, accum);
        }
        tiles.find_again(tile);
        scales.apply(accum[0], tile, shared_address(s.staging) + math_group * (2 * c.stage_bytes()), 1 + math_group, turns);
        if constexpr (c.finishes()) finish<c>(accum, args, tile, block_of<c>(tile, place_in_cluster<c>()), math_group);
        store_accum<c>(accum, tile, math_group, columns, shared_address(s.staging), turns, out);
    }
}

// The store policy of a product that stays on this rank.
template <GemmConfig c>
MOECOMM_FN auto store_here(const GemmArgs& args) {
    const i32 columns = c.gated ? args.columns / 2 : args.columns;
    if constexpr (c.out == Type::e4m3) {
        return StoreCastRows{args.out, args.out_scales, columns, ceil_div(columns, kScaleGroup)};
    } else {
        return StoreRows{args.out, columns};
    }
}

// The kernel: all threads of all blocks, in whole clusters.  Waits for no peer and cannot fail.
template <GemmConfig c>
MOECOMM_FN void grouped_gemm(const GemmArgs& args) {
    extern __shared__ __align__(1024) u8 memory[];
    auto& s = *reinterpret_cast<GemmShared<c>*>(memory);
    static_assert(sizeof(GemmShared<c>) <= c.shared_bytes(), "gemm_shared_bytes bounds it");
    if (threadIdx.x == 0) {
        prefetch_map(args.w);
        for (const TensorMap& map : args.x) prefetch_map(map);
        s.init();
        barrier_init_done();
    }
    await_earlier_kernels();
    launch_dependents();
    for (i32 g = threadIdx.x; g < args.grouping.groups; g += c.threads()) s.counts[g] = reinterpret_cast<const i32*>(args.counts)[g];
    sync_cluster<c.cluster>();
    static_assert(c.registers() <= c.launched_registers(), "what setmaxnreg may move");
    const u32 warp = uniform(warp_id());
    if (warp < kWarpgroup / kWarp) {
        reg_dealloc<c.loader_registers()>();
        if (warp == 0 && lane_id() == 0) load_tiles(s, args);
        if constexpr (c.has_slot_scales()) {
            if (warp == 2) load_scales(s, args);
        }
        if constexpr (c.widens()) {
            if (warp == 3 && lane_id() == 0) queue_tiles(s, args);
        } else if constexpr (c.dynamic) {
            if (warp == 3 && lane_id() == 0) schedule_tiles(s, args);
        }
    } else if (c.widens() && warp >= kGemmThreads / kWarp) {
        reg_dealloc<c.widening_registers()>();
        if constexpr (c.widens()) widen_tiles(s, args);
    } else {
        reg_alloc<c.math_registers()>();
        make_tiles(s, args, store_here<c>(args));
    }
    if constexpr (c.cluster > 1) sync_cluster<c.cluster>();  // a block must not exit while peers load or arrive in its shared memory
}

}  // namespace moecomm
