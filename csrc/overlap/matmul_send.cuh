// Products whose tiles go to other ranks, in one launch: matmul_reduce_scatter, matmul_all_reduce, matmul_all_to_all. send_tiles.h has the
// order of tiles and where they go.
//
//   warp 0 of a block   loads tiles, with e4m3 their scales too (gemm/gemm.cuh)
//   math warpgroups     multiply; store each tile, rounded, in the staging of its destination, 128 bytes of a row at a time
//   warp 1              raises the flag of each stored tile
//   warps 2 and 3       collect what has arrived (collect.cuh), while later tiles are computed; all-reduce: warp 3 what ranks have reduced
// After its last tile the math warps of a block collect, too.
//
// Bytes: every rank sends (ranks - 1) / ranks of its product, and reads all parts of its own share: M N 2 bytes of memory reads for a
// reduce-scatter, at most a tenth of the memory bandwidth while the tensor cores compute 8192 x 8192 x 3584. So two warps a block, with few
// registers, keep up, and what remains after the last tile is the last wave of tiles.
//
// Order: the math warps' arrivals at `stored` order their stores before warp 1, whose release at system scope then covers them. A warp that
// collects acquires the flags, and reads staging past L1.
#pragma once
#include "collect.cuh"
#include "split_depth.cuh"

namespace moecomm {

constexpr i32 kStoredTiles = 2;  // a tile is announced while the next one is multiplied

template <GemmConfig c, i32 split>
struct SendShared {
    GemmShared<c> gemm;
    SplitSums<c, split> split_sums;
    u64 stored[kStoredTiles];     // completes when all math warps have stored the tile
    u64 announced[kStoredTiles];  // completes when the tile's flag is raised

    MOECOMM_FN void init() {
        gemm.barriers.init();
        split_sums.init();
        for (i32 i = 0; i < kStoredTiles; ++i) {
            barrier_init(&stored[i], kMathGroups * kWarpgroup / kWarp);
            barrier_init(&announced[i], 1);
        }
    }
};

using StoredPlace = Place<kStoredTiles>;

// Calls body(tile) for all tiles of this block's cluster, in order.
template <GemmConfig c, Send send, i32 ranks, i32 split, class Body>
MOECOMM_FN void for_my_tiles(const SendMatmulArgs& a, const Body& body) {
    const auto tiles = send_tiles<c, send, ranks, split>(a);
    constexpr i32 cluster = c.cluster * split;
    const i32 clusters = static_cast<i32>(gridDim.x) / cluster;
    BlockTile found;
    for (i32 index = blockIdx.x / cluster; tiles.find(index, found); index += clusters) body(found);
}

// Store policy: rows `pitch` bytes apart, from where row 0 and column 0 of the product would be.
struct StorePitched {
    u64 base;
    i32 pitch;

    MOECOMM_FN void store(i32 row, i32 column, const uint4& values) const {
        store_vector(base + static_cast<i64>(row) * pitch + column * 2, values);
    }
};
template <GemmConfig c, Send send, i32 ranks, i32 split>
MOECOMM_FN StorePitched store_at(const SendMatmulArgs& a, const OverlapRound& round, const BlockTile& found, i32 of_cluster) {
    const auto tiles = send_tiles<c, send, ranks, split>(a);
    const i32 to = tiles.destination(found.index);
    if (send == Send::all_to_all && to == round.rank()) {
        const i32 pitch = a.gemm.columns * 2;
        return {a.gemm.out + static_cast<i64>(tiles.result_row(found, to)) * pitch, pitch};
    }
    const u64 tile = round.staging(to) + tiles.staged(tiles.part(found.index, of_cluster), round.rank());
    constexpr i32 pitch = kTileRowBytes<c>;
    return {tile - static_cast<i64>(found.tile.row) * pitch - static_cast<i64>(block_of<c>(found.tile, of_cluster)) * pitch, pitch};
}

// The math role: a warpgroup multiplies tiles from the ring and stores them.
template <GemmConfig c, Send send, i32 ranks, i32 split>
MOECOMM_FN void make_sent_tiles(SendShared<c, split>& s, const SendMatmulArgs& a, const OverlapRound& round) {
    const i32 math_group = this_math_group();
    const Steps mine = my_steps<c, split>(a.gemm);
    RingPlace<c> place;
    StoredPlace stored;
    u32 turns = 0, phase = 0;
    float accum[c.parts()][c.most_rows / 2] = {};
    for_my_tiles<c, send, ranks, split>(a, [&](const BlockTile& found) {
        if (split == 1 || mine.first < mine.end) {
            multiply_padded<c>(s.gemm, place, math_group, mine.end - mine.first, found.tile.padded, accum);
        } else {
            for (float& sum : accum[0]) sum = 0;
        }
        if constexpr (split > 1) add_blocks(s.split_sums, accum[0], phase);
        // Only now: registers are scarce while the warpgroup multiplies.
        const auto out = store_mine<split>(store_at<c, send, ranks, split>(a, round, found, place_in_cluster<c>()), found.tile.row);
        store_accum<c>(accum, found.tile, math_group, a.gemm.columns, shared_address(s.gemm.staging), turns, out);
        copy_wait(&s.announced[stored.slot], stored.phase ^ 1);
        __syncwarp();
        if (lane_id() == 0) arrive(&s.stored[stored.slot]);
        stored.step();
    });
}

// The role of warp 1: one thread.
template <GemmConfig c, Send send, i32 ranks, i32 split>
MOECOMM_FN void announce_tiles(SendShared<c, split>& s, const SendMatmulArgs& a, const OverlapRound& round) {
    const auto tiles = send_tiles<c, send, ranks, split>(a);
    StoredPlace stored;
    for_my_tiles<c, send, ranks, split>(a, [&](const BlockTile& found) {
        const i32 to = tiles.destination(found.index), part = tiles.part(found.index, place_in_cluster<c>());
        copy_wait(&s.stored[stored.slot], stored.phase);
        if (send != Send::all_to_all || to != round.rank())
            store_release(round.flag(to, tiles.staged_flag(part, round.rank()) + place_in_split<split>()), round.number);
        arrive(&s.announced[stored.slot]);
        stored.step();
    });
}

// The kernel: all threads of all blocks, in whole clusters, no more blocks than are resident. All waits have the Window's deadline.
template <GemmConfig c, Send send, i32 ranks, i32 split>
MOECOMM_FN void matmul_send(const SendMatmulArgs& a) {
    extern __shared__ __align__(1024) u8 memory[];
    auto& s = *reinterpret_cast<SendShared<c, split>*>(memory);
    static_assert(split == 1 || (c.cluster == 1 && send == Send::all_reduce), "split products have clusters of their own");
    static_assert(sizeof(SendShared<c, split>) <= c.shared_bytes() + (split > 1 ? split_sums_bytes(c.most_rows) : 0) + 64,
                  "what is launched");
    constexpr RoleRegisters registers = !c.swapped && send == Send::all_to_all ? kRowsCopyRegisters : kRoleRegisters;
    begin_product<c.cluster * split>(a.gemm, [&] { s.init(); });
    const OverlapRound round(a.overlap);
    if (threadIdx.x < kWarpgroup) {
        reg_dealloc<registers.link>();
        if (warp_id() == 0) {
            const i32 rank = place_in_cluster<c>();
            RingPlace<c> place;
            for_my_tiles<c, send, ranks, split>(a, [&](const BlockTile& found) {
                load_tile_and_scales(s.gemm, a.gemm, a.gemm.x, a.gemm.x_scales, found.tile, rank, my_steps<c, split>(a.gemm), place);
            });
        } else if (warp_id() == 1) {
            if (lane_id() == 0) announce_tiles<c, send, ranks, split>(s, a, round);
        } else if (warp_id() >= 2) {
            collect<c, send, ranks, split>(a, round);
        }
    } else {
        reg_alloc<registers.product>();
        make_sent_tiles<c, send, ranks, split>(s, a, round);
        collect<c, send, ranks, split>(a, round);
    }
    if constexpr (c.cluster * split > 1)
        sync_cluster<c.cluster * split>();  // a block must not exit while peers load or arrive in its shared memory
    round.end();
}

}  // namespace moecomm
