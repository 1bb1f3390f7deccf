// all_gather_matmul in one launch: out = concat(x of all ranks) w^T. Every rank has all of w, and computes all rows.
//
//   warp 0 of a block     loads tiles (gemm/gemm.cuh); before the rows of another rank it waits for their flags
//   warps 1 to 3          push this rank's rows to all others (push_rows.cuh), then copy the gathered rows if they are wanted
//   math warpgroups       multiply, and store tiles in local memory
// With e4m3 the scales of rows travel with them, and warp 0 loads scales, too.
//
// Tiles of this rank's rows come first and need no flag; those of ranks r + 1, r + 2, ... follow, in the order in which rows arrive. If
// rows are not there yet, the loader first loads w for as many steps as the ring has slots, and then waits. If they are there, it looks at
// the flags while the ring is full of the tile before, and so costs nothing.
//
// Bytes: (ranks - 1) / ranks of all rows cross each link once in each direction. With b bytes of rows a rank and 320 GB/s the wire takes
// (ranks - 1) b / 320 GB/s; the product takes 2 M N K / 700 TFLOP/s. 1024^3 on 4 ranks: 4.9 and 3.1 us, so latency decides; 8192^3: 315 and
// 1570 us, so the wire is hidden.
//
// Order: a pushing warp's stores come before its flag (release at system scope, after __syncwarp). All lanes of the loader warp acquire the
// flags; lane 0 then fences between the proxies, because tensor copies read what ordinary stores of another rank wrote. Scales are loaded
// through L1, which may then hold a line with scales that had not arrived. So the loader warp, the only one of its block that loads scales,
// acquires the flags of each tile itself, when its earlier loads are complete: an acquire empties L1.
#pragma once
#include "../gemm/gemm.cuh"
#include "block_tiles.h"
#include "push_rows.cuh"

namespace moecomm {

constexpr i32 kPushWarps = kWarpgroup / kWarp - 1;  // of a block

MOECOMM_FN BlockOrder gather_order(const GatherMatmulArgs& a) { return {false, a.overlap.window.ranks, a.overlap.window.rank}; }

// The loader role: a whole warp, of which lane 0 loads all but scales. After a failure it loads what is there, so that no other role hangs.
template <GemmConfig c>
MOECOMM_FN void load_gathered(GemmShared<c>& s, const GatherMatmulArgs& a, const OverlapRound& round) {
    const i32 rank = place_in_cluster<c>(), steps = ceil_div(a.gemm.depth, c.depth()), clusters = gridDim.x / c.cluster;
    const BlockOrder order = gather_order(a);
    const bool loads = lane_id() == 0, fills = c.scaled() || loads;
    bool failed = false;
    RingPlace<c> place;
    BlockTile found;
    for (i32 index = blockIdx.x / c.cluster; find_block_tile(a.gemm.grouping, order, index, found); index += clusters) {
        const i32 first_row = found.block * a.gemm.grouping.group_rows;
        if (found.block == round.rank()) {
            found.tile.row -= first_row;
            load_tile_and_scales(s, a.gemm, a.gemm.x, a.gemm.x_scales, found.tile, rank, all_steps<c>(a.gemm), place);
            continue;
        }
        const TensorMap* const x = a.gathered + round.half() * kRowMaps;
        const u64 x_scales = round.staging(round.rank()) + a.scales;
        if constexpr (c.scaled()) {
            finish_scales();
            __syncwarp();
        }
        const RowFlags flags(a, round, found.block, found.tile.row - first_row, found.tile.rows);
        if (failed || flags.have(round)) {
            if (loads) fence_async();
            load_tile_and_scales(s, a.gemm, x, x_scales, found.tile, rank, all_steps<c>(a.gemm), place);
            continue;
        }
        const i32 ahead = min(c.stages, steps);
        RingPlace<c> of_rows = place;
        const auto load_next_weights = [&](i32 step) {
            copy_wait(&s.barriers.empty[place.slot], place.phase ^ 1);
            if (loads) load_weights<c, false>(s, a.gemm, found.tile, rank, step * c.depth(), place.slot);
            place.step();
        };
        for (i32 step = 0; step < ahead && fills; ++step) load_next_weights(step);
        failed = !flags.await(round, found.block);
        if (!fills) continue;
        if (loads) fence_async();
        TileScales<c> scales(a.gemm, found.tile, rank, x_scales);
        for (i32 step = 0; step < steps; ++step, of_rows.step()) {
            if (step >= ahead) load_next_weights(step);
            if (loads) load_rows<c>(s, x, found.tile, rank, step * c.depth(), of_rows.slot);
            scales.load(s, a.gemm, found.tile, of_rows.slot);
        }
    }
}

// The math role: a warpgroup multiplies tiles from the ring and stores them.
template <GemmConfig c>
MOECOMM_FN void make_gathered_tiles(GemmShared<c>& s, const GatherMatmulArgs& a) {
    const i32 math_group = this_math_group(), steps = ceil_div(a.gemm.depth, c.depth());
    const i32 clusters = gridDim.x / c.cluster;
    const BlockOrder order = gather_order(a);
    RingPlace<c> place;
    u32 turns = 0;
    float accum[c.parts()][c.most_rows / 2] = {};
    BlockTile found;
    for (i32 index = blockIdx.x / c.cluster; find_block_tile(a.gemm.grouping, order, index, found); index += clusters) {
        multiply_padded<c>(s, place, math_group, steps, found.tile.padded, accum);
        store_accum<c>(accum, found.tile, math_group, a.gemm.columns, shared_address(s.staging), turns, store_here<c>(a.gemm));
    }
}

// The kernel: all threads of all blocks, in whole clusters, no more blocks than are resident. All waits have the Window's deadline.
template <GemmConfig c>
MOECOMM_FN void all_gather_matmul(const GatherMatmulArgs& a) {
    extern __shared__ __align__(1024) u8 memory[];
    auto& s = *reinterpret_cast<GemmShared<c>*>(memory);
    static_assert(sizeof(GemmShared<c>) <= c.shared_bytes(), "gemm_shared_bytes bounds it");
    begin_product<c.cluster>(a.gemm, [&] {
        for (const TensorMap& map : a.gathered) prefetch_map(map);
        s.barriers.init();
    });
    const OverlapRound round(a.overlap);
    const i32 role = static_cast<i32>(uniform(warp_id()));
    if (role < kWarpgroup / kWarp) {
        reg_dealloc<kRoleRegisters.link>();
        if (role == 0) {
            load_gathered(s, a, round);
        } else {
            const i32 warp = (role - 1) * gridDim.x + blockIdx.x, warps = kPushWarps * gridDim.x;
            push_rows<c>(a, round, warp, warps);
            if (a.gathered_out != 0) copy_gathered<c>(a, round, warp, warps);
        }
    } else {
        reg_alloc<kRoleRegisters.product>();
        make_gathered_tiles(s, a);
    }
    if constexpr (c.cluster > 1) sync_cluster<c.cluster>();  // a block must not exit while peers load or arrive in its shared memory
    round.end();
}

}  // namespace moecomm
