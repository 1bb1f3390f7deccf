// Tiles of a product whose rows form equal blocks, and their order. Plain C++: tests run it on the host.
//
// A block is what one rank owns: its rows of x (all_gather_matmul), or the rows whose results it gets. Blocks are cut into row tiles as
// groups are in gemm/tiles.h, evenly and in whole units, so no tile has rows of two ranks. Row tiles of all blocks are ordered
//   in turn:      block after block, from `first` on, around all of them,
//   alternating:  in sets of `ranks` blocks; the first row tiles of a set's blocks, from `first` on, then their second row tiles, and so
//   on.
// Bands of `band` row tiles take all column tiles before the next band, with row tiles innermost, as in gemm/tiles.h.
#pragma once
#include "../gemm/tiles.h"

namespace moecomm {

struct BlockOrder {
    bool alternating;
    i32 ranks;  // blocks of a set
    i32 first;
};

struct BlockTile {
    Tile tile;  // group: the set; row: counted over all blocks; nth: the row tile in its block
    i32 block;
    i32 index;  // of the tile in the order
};

MOECOMM_BOTH i32 row_tiles_of_block(const Grouping& g) { return ceil_div(g.group_rows, g.most_rows); }
MOECOMM_BOTH i32 count_block_tiles(const Grouping& g) { return row_tiles_of_block(g) * g.groups * g.column_tiles; }

// Row tile `nth` of a block.
MOECOMM_BOTH void place_in_block(const Grouping& g, i32 block, i32 nth, i32 column, Tile& tile) {
    const i32 tiles = row_tiles_of_block(g), all = ceil_div(g.group_rows, g.unit);
    const i32 units = all / tiles, larger = all % tiles;  // the first `larger` tiles have one unit more
    const i32 from = (nth * units + (nth < larger ? nth : larger)) * g.unit;
    tile.group = 0;
    tile.row = block * g.group_rows + from;
    tile.padded = (units + (nth < larger ? 1 : 0)) * g.unit;
    tile.rows = tile.padded < g.group_rows - from ? tile.padded : g.group_rows - from;
    tile.column = column;
    tile.only_row_tile = false;
    tile.nth = nth;
}

// Tile number `index` of the order. False if there are not that many.
MOECOMM_BOTH bool find_block_tile(const Grouping& g, const BlockOrder& order, i32 index, BlockTile& found) {
    const i32 of_block = row_tiles_of_block(g), all = of_block * g.groups;
    if (index >= all * g.column_tiles) return false;
    const i32 in_band = g.band * g.column_tiles, band = index / in_band, rest = index % in_band;
    const i32 left = all - band * g.band, width = left < g.band ? left : g.band;
    const i32 row_tile = band * g.band + rest % width, blocks = order.alternating ? order.ranks : g.groups;
    const i32 set = row_tile / (of_block * blocks), in_set = row_tile % (of_block * blocks);
    const i32 turn = order.alternating ? in_set % blocks : in_set / of_block;
    found.block = set * blocks + (turn + order.first) % blocks;
    found.index = index;
    place_in_block(g, found.block, order.alternating ? in_set / blocks : in_set % of_block, rest / width, found.tile);
    found.tile.group = set;
    return true;
}

}  // namespace moecomm
