// Which tiles of a grouped product there are, and in what order they are made.  Plain C++: tests run it on the host.
//
// Rows come in groups, one an expert; their counts are only known on the device.  A group's rows are cut into pieces of `unit` rows, and
// these are spread as evenly as they go over the fewest tiles that hold at most `most_rows`: a group of 260 rows becomes tiles of 144 and
// 128 rows (units of 16) and not of 256 and 16, whose weights would take as long to load.  Columns are cut into `column_tiles`.
//
// A group's tiles follow each other, so that all blocks read the weights of one expert at a time.  Inside a group, bands of `band` row
// tiles: all columns of a band come before the next band, and the row tiles of the band are innermost.  What the blocks work on at one time
// is then a rectangle of rows and columns, whose rows stay in the second-level cache.
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {

struct Tile {
    i32 group;
    i32 row;     // first, of all rows
    i32 rows;    // that belong to the group
    i32 padded;  // the same in whole units
    i32 column;  // tile of columns
    bool alone;  // no other row tile of the group reads these weights
    i32 nth;     // of all row tiles
};

struct Grouping {
    i32 groups;
    i32 alignment;   // each group begins at a multiple of it ...
    i32 group_rows;  // ... unless this is not 0: group g then begins at g * group_rows
    i32 rows;        // of all groups together; whatever the counts say, no tile reaches beyond them
    i32 column_tiles;
    i32 band;
    i32 unit, most_rows;  // of rows; the second is a multiple of the first
};

struct RowTiles {
    i32 all;
    i32 widest;  // of a band
};

// Walks all tiles in order; `find` is asked for growing numbers.
class TileWalk {
  public:
    MOECOMM_BOTH TileWalk(const Grouping& grouping, const i32* counts) : grouping_(&grouping), counts_(counts) { enter(0, 0); }

    // Tile number `index`; false if there are not that many.
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

    // All there are.  `most_rows`: see count_rows.
    template <i32 most_rows = 0>
    MOECOMM_BOTH static i32 count(const Grouping& grouping, const i32* counts) {
        return count_rows<most_rows>(grouping, counts).all * grouping.column_tiles;
    }
    // By one thread, before a block can begin with any of them.  `most_rows`: grouping.most_rows, where the compiler knows it: divisions
    // for every group took as long as a dispatch: 7 us for 32 experts, 13 for 64.
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
    // Rows of a group with such a count; `begin`: end_of the one before.
    MOECOMM_BOTH static i32 rows_of(const Grouping& grouping, i32 count, i32 begin) {
        const i32 room = grouping.group_rows != 0 ? grouping.group_rows : grouping.rows - smaller(begin, grouping.rows);
        return count < 0 ? 0 : smaller(count, room);
    }
    // Where the next group begins.
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
    // The first units_ % row_tiles_ tiles have one unit more than the others.
    MOECOMM_BOTH void place(i32 row_tile, Tile& tile) const {
        const i32 units = units_ / row_tiles_, larger = units_ % row_tiles_;
        const i32 from = (row_tile * units + smaller(row_tile, larger)) * grouping_->unit;
        tile.group = group_;
        tile.row = begin_ + from;
        tile.padded = (units + (row_tile < larger ? 1 : 0)) * grouping_->unit;
        tile.rows = smaller(tile.padded, rows_ - from);
        tile.alone = row_tiles_ == 1;
        tile.nth = before_ + row_tile;
    }

    const Grouping* grouping_;
    const i32* counts_;
    i32 first_ = 0;   // number of the group's first tile
    i32 before_ = 0;  // row tiles of the groups before
    i32 group_, begin_ = 0, rows_ = 0, units_ = 0, row_tiles_ = 0;
};

}  // namespace moecomm
