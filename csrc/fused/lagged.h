// Order of the tiles of two products in one launch, where the second product multiplies the first one's result.  Plain C++: tests run it on
// the host.
//
// Both products cut the same rows into the same row tiles.  Each has its own column tiles and its own order of tiles (TileWalk).  The
// launch begins with `lead` tiles of the first product.  Then the products alternate, each with the tiles of `row_tiles_per_turn` row tiles
// a step, until the first has no tiles left; the rest of the second follows.
//
// Invariant: a tile of the second product comes after all tiles of the first product that write its rows, by at least `lag` tiles of the
// first.  Proof: let first and second be the products' numbers of column tiles.  Before tile j of the second product there are at least
// lead + j * first / second tiles of the first, because the first product's steps come first.  Let R be the number of row tiles before the
// band of tile j.  Then j >= R * second, so there are at least lead + R * first tiles of the first.  The band's tiles of the first product
// end at (R + widest) * first or before.  So lead = widest * first + lag is enough, whatever the groups are.  (Or the first has no tiles
// left.)
//
// Hence a tile waits only for fetched rows or for tiles at smaller positions.  Every cluster takes the next free position and processes its
// positions in that order.  So the cluster that took the smallest unfinished position has finished all earlier ones and waits for nothing
// but fetched rows: it can proceed, and so can the launch, however many blocks of it are resident.
#pragma once
#include "../gemm/tiles.h"

namespace moecomm {

class LaggedWalk {
  public:
    // `first` and `second` differ in their columns only; `rows`: TileWalk::count_rows of either.
    MOECOMM_BOTH LaggedWalk(const Grouping& first, const Grouping& second, const i32* counts, RowTiles rows, i32 lag,
                            i32 row_tiles_per_turn)
        : first_(first, counts),
          second_(second, counts),
          columns_{first.column_tiles, second.column_tiles},
          row_tiles_per_turn_(row_tiles_per_turn) {
        all_ = rows.all * columns_[0];
        lead_ = all_ - rows.widest * columns_[0] <= lag ? all_ : rows.widest * columns_[0] + lag;
    }

    // Sets `tile` and `is_second` to the tile at `position`.  Returns false if there are not that many.  Each call must pass a larger
    // position than the one before.
    MOECOMM_BOTH bool find(i32 position, Tile& tile, bool& is_second) {
        const i32 index = place(position, is_second);
        return is_second ? second_.find(index, tile) : first_.find(index, tile);
    }

  private:
    // Returns the index of the tile at `position` in the order of its own product.
    MOECOMM_BOTH i32 place(i32 position, bool& is_second) const {
        is_second = false;
        if (position < lead_) return position;
        const i32 alternately = position - lead_, of_first = lead_ + before(alternately);
        is_second = of_first >= all_ || before(alternately + 1) == before(alternately);
        if (!is_second) return of_first;
        return of_first >= all_ ? position - all_ : position - of_first;
    }
    // Returns how many of the first `alternately` tiles after the lead belong to the first product.
    MOECOMM_BOTH i32 before(i32 alternately) const {
        const i32 mine = row_tiles_per_turn_ * columns_[0], both = mine + row_tiles_per_turn_ * columns_[1], rest = alternately % both;
        return alternately / both * mine + (rest < mine ? rest : mine);
    }

    TileWalk first_, second_;
    i32 columns_[2];  // column tiles
    i32 row_tiles_per_turn_;
    i32 all_, lead_;  // tiles of the first product: all, and those before any tile of the second
};

}  // namespace moecomm
