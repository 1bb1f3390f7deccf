// Tiles of a product that go to other ranks: their order, their destinations and their places in staging. Plain C++.
//
// Tile number i of the order goes to rank i % ranks, as its unit i / ranks. All ranks compute tiles in the same order. So the parts of a
// unit arrive at about the same time, all destinations receive all the time, and units are complete while later ones are computed.
//   reduce-scatter   one block of rows for each rank; row tiles alternate between the blocks,
//   all-to-all       as many blocks for each expert, one expert after the other,
//   all-reduce       one block of all rows; any rank may reduce any tile, and sends the sum to all.
// The band of the order is a multiple of `ranks`, so destinations alternate along the whole order.
//
// Staging at the destination: [unit][block of the cluster][source rank][pitch_rows][columns of a block], and a flag for each
// block that stores a source's part.
#pragma once
#include "args.h"
#include "block_tiles.h"

namespace moecomm {

enum class Send { reduce_scatter, all_reduce, all_to_all };

template <Send send, i32 ranks>
struct SendTiles {
    const SendMatmulArgs& a;
    i32 cluster;
    i32 row_bytes;  // of a tile in staging
    i32 split;      // blocks that store a part of a tile each (split_depth.cuh)

    MOECOMM_BOTH i32 count() const { return count_block_tiles(a.gemm.grouping); }
    MOECOMM_BOTH bool find(i32 index, BlockTile& found) const {
        return find_block_tile(a.gemm.grouping, {send != Send::all_reduce, ranks, 0}, index, found);
    }
    MOECOMM_BOTH static i32 destination(i32 index) { return index % ranks; }
    // Units of a rank, times the blocks of a cluster.
    MOECOMM_BOTH i32 parts(i32 rank) const { return (count() - rank + ranks - 1) / ranks * cluster; }
    MOECOMM_BOTH i32 part(i32 index, i32 of_cluster) const { return index / ranks * cluster + of_cluster; }
    // Bytes from the beginning of a half to what `source` sends of a part.
    MOECOMM_BOTH u64 staged(i32 part, i32 source) const { return (static_cast<u64>(part) * ranks + source) * a.pitch_rows * row_bytes; }
    MOECOMM_BOTH i32 staged_flag(i32 part, i32 source) const { return (part * ranks + source) * split; }  // the first of `split`
    // All-reduce: likewise of the sum of a tile, and of the flag of a slice of it.
    MOECOMM_BOTH u64 reduced(i32 index, i32 of_cluster) const {
        return a.results + (static_cast<u64>(index) * cluster + of_cluster) * a.pitch_rows * row_bytes;
    }
    MOECOMM_BOTH i32 reduced_flag(i32 index, i32 of_cluster, i32 slice) const {
        return ceil_div(count(), ranks) * cluster * ranks * split + (index * cluster + of_cluster) * a.slices + slice;
    }
    // The row of the result that row 0 of the product would have, for what `source` computed of this tile.
    MOECOMM_BOTH i32 result_row(const BlockTile& found, i32 source) const {
        const i32 rows = a.gemm.grouping.group_rows;
        if (send == Send::all_reduce) return 0;
        if (send == Send::reduce_scatter) return -found.block * rows;
        return (source * (a.gemm.grouping.groups / ranks) + found.tile.group - found.block) * rows;
    }
};

}  // namespace moecomm
