// Tiles of a grouped product and their order.  Plain C++: tests run it on the host.
//
// Rows form groups, one per expert; only the device knows their counts.  A group's rows are cut into units of `unit` rows, and the units
// are distributed as evenly as possible over the fewest tiles of at most `most_rows` rows: a group of 260 rows becomes tiles of 144 and 128
// rows (units of 16).  Tiles of 256 and 16 rows would load as many weights for the 16 rows as for the 256.  Columns are cut into
// `column_tiles`.
//
// The tiles of a group are consecutive, so that all blocks read the weights of one expert at a time.  Inside a group, tiles are ordered in
// bands of `band` row tiles: all columns of a band come before the next band, and the row tiles of the band are innermost.  At any time the
// blocks then work on a rectangle of rows and columns, whose rows stay in the L2 cache.
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {

struct Tile {
    i32 group;
    i32 row;             // first row, counted over all groups
    i32 rows;            // rows of the group in this tile
    i32 padded;          // `rows`, rounded up to units
    i32 column;          // column tile
    bool only_row_tile;  // the only row tile of its group: no other reads these weights
    i32 nth;             // index of its row tile, counted over all groups
};

struct Grouping {
    i32 groups;
    i32 alignment;   // each group begins at a multiple of it, if group_rows is 0
    i32 group_rows;  // not 0: group g begins at g * group_rows
    i32 rows;        // of all groups together; whatever the counts say, no tile reaches beyond them
    i32 column_tiles;
    i32 band;             // row tiles
    i32 unit, most_rows;  // rows; most_rows is a multiple of unit
};

struct RowTiles {
    i32 all;
    i32 widest;  // most row tiles in a band
};

// Iterates over all tiles in order.  Each call of `find` must pass a larger index than the one before.
class TileWalk {
  public:
    MOECOMM_BOTH TileWalk(const Grouping& grouping, const i32* counts) : grouping_(&grouping), counts_(counts) { enter(0, 0); }

    // Sets `tile` to tile number `index`.  Returns false if there are not that many.
    MOECOMM_BOTH bool find(i32 index, Tile& tile) {
        while (group_ < grouping_->groups && index - first_ >= row_tiles_ * grouping_->column_tiles) {
            first_ += row_tiles_ * grouping_->column_tiles;
            before_ += row_tiles_;
            enter(group_ + 1, end_of(*grouping_, begin_ + rows_));
        }
        if (group_ >= grouping_->groups) return false;
        const i32 in_group = index - first_, in_band = grouping_->band * grouping_->column_tiles;
        const i32 band = in_group / in_band, rest = in_group % in_band;
        const i32 width = smaller(grouping_->band, row_tiles_ - band * grouping_->band);
        place(band * grouping_->band + rest % width, tile);
        tile.column = rest / width;
        return true;
    }

    // Number of tiles.  `most_rows`: see count_rows.
    template <i32 most_rows = 0>
    MOECOMM_BOTH static i32 count(const Grouping& grouping, const i32* counts) {
        return count_rows<most_rows>(grouping, counts).all * grouping.column_tiles;
    }
    // Counts row tiles.  One thread calls it before its block can begin.  `most_rows`: grouping.most_rows where it is a constant, so that
    // the compiler removes the division for each group; with divisions this took 7 us for 32 experts and 13 us for 64, as long as a
    // dispatch.
    template <i32 most_rows = 0>
    MOECOMM_BOTH static RowTiles count_rows(const Grouping& grouping, const i32* counts) {
        RowTiles found{0, 0};
        i32 begin = 0;
        for (i32 group = 0; group < grouping.groups; ++group) {
            const i32 rows = rows_of(grouping, counts[group], begin);
            const i32 tiles = most_rows != 0 ? ceil_div(rows, most_rows) : ceil_div(rows, grouping.most_rows);
            found.all += tiles;
            const i32 width = smaller(tiles, grouping.band);
            if (width > found.widest) found.widest = width;
            begin = end_of(grouping, begin + rows);
        }
        return found;
    }

  private:
    MOECOMM_BOTH static i32 smaller(i32 a, i32 b) { return a < b ? a : b; }
    // Rows of a group, `count` clamped to the room that is left.  `begin`: end_of the group before.
    MOECOMM_BOTH static i32 rows_of(const Grouping& grouping, i32 count, i32 begin) {
        const i32 room = grouping.group_rows != 0 ? grouping.group_rows : grouping.rows - smaller(begin, grouping.rows);
        return count < 0 ? 0 : smaller(count, room);
    }
    // First row of the next group.
    MOECOMM_BOTH static i32 end_of(const Grouping& grouping, i32 rows) {
        return grouping.alignment == 1 ? rows : align_up(rows, grouping.alignment);
    }

    MOECOMM_BOTH void enter(i32 group, i32 begin) {
        group_ = group;
        if (group >= grouping_->groups) return;
        begin_ = grouping_->group_rows != 0 ? group * grouping_->group_rows : begin;
        rows_ = rows_of(*grouping_, counts_[group], begin_);
        units_ = ceil_div(rows_, grouping_->unit);
        row_tiles_ = ceil_div(rows_, grouping_->most_rows);
    }
    // The first units_ % row_tiles_ tiles have one unit more than the rest.
    MOECOMM_BOTH void place(i32 row_tile, Tile& tile) const {
        const i32 units = units_ / row_tiles_, larger = units_ % row_tiles_;
        const i32 from = (row_tile * units + smaller(row_tile, larger)) * grouping_->unit;
        tile.group = group_;
        tile.row = begin_ + from;
        tile.padded = (units + (row_tile < larger ? 1 : 0)) * grouping_->unit;
        tile.rows = smaller(tile.padded, rows_ - from);
        tile.only_row_tile = row_tiles_ == 1;
        tile.nth = before_ + row_tile;
    }

    const Grouping* grouping_;
    const i32* counts_;
    i32 first_ = 0;   // index of the group's first tile
    i32 before_ = 0;  // row tiles of earlier groups
    i32 group_, begin_ = 0, rows_ = 0, units_ = 0, row_tiles_ = 0;
};

}  // namespace moecomm
