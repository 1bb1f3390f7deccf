// In what order the tiles of two products are made in one launch, where rows of the second are multiplied that the first makes.  Plain
// C++: tests run it on the host.
//
// Both cut the same rows into the same row tiles; each has columns of its own, and its tiles in its own order (TileWalk).  First come
// `lead` tiles of the first product alone.  Then the two take turns, as many tiles each as `rotation_step` row tiles have, until the first
// has none left, and the rest of the second follows.
//
// The rule: a tile of the second product comes after all tiles of the first that make its rows, by at least `lag` tiles of the first.  For
// where the second has j tiles, the first, whose turns come before the second's, has lead + j * first / second at least.  Let j be in a
// band before which there are R row tiles.  Then j >= R * second, so the first has lead + R * first, and the band ends at
// (R + widest) * first at most: lead = widest * first + lag is enough, whatever the groups are.  (Or the first has none left.)
//
// So a tile waits for fetched rows, or for tiles at smaller positions alone.  Whoever makes tiles takes positions one after the other, each
// the next that nobody has, and makes what it has in that order.  Then the smallest position that is not made has been taken by somebody
// who has made all it took before, and who waits for nothing but rows: it can go on, and so can the launch, however many blocks of it run.
#pragma once
#include "../gemm/tiles.h"

namespace moecomm {

class LaggedWalk {
  public:
    // Groupings that differ in their columns alone, and what TileWalk counts of them.
    MOECOMM_BOTH LaggedWalk(const Grouping& first, const Grouping& second, const i32* counts, RowTiles rows, i32 lag, i32 rotation_step)
        : first_(first, counts), second_(second, counts), columns_{first.column_tiles, second.column_tiles}, rotation_step_(rotation_step) {
        all_ = rows.all * columns_[0];
        lead_ = all_ - rows.widest * columns_[0] <= lag ? all_ : rows.widest * columns_[0] + lag;
    }

    // What is made at a position; false if there are not that many.  Asked for growing ones.
    MOECOMM_BOTH bool find(i32 position, Tile& tile, bool& is_second) {
        const i32 index = place(position, is_second);
        return is_second ? second_.find(index, tile) : first_.find(index, tile);
    }

  private:
    // The number of the tile there, in the order of its product.
    MOECOMM_BOTH i32 place(i32 position, bool& is_second) const {
        is_second = false;
        if (position < lead_) return position;
        const i32 alternately = position - lead_, of_first = lead_ + before(alternately);
        is_second = of_first >= all_ || before(alternately + 1) == before(alternately);
        if (!is_second) return of_first;
        return of_first >= all_ ? position - all_ : position - of_first;
    }
    // Of so many that take turns, those of the first product.
    MOECOMM_BOTH i32 before(i32 alternately) const {
        const i32 mine = rotation_step_ * columns_[0], both = mine + rotation_step_ * columns_[1], rest = alternately % both;
        return alternately / both * mine + (rest < mine ? rest : mine);
    }

    TileWalk first_, second_;
    i32 columns_[2];  // tiles of them
    i32 rotation_step_;
    i32 all_, lead_;  // tiles of the first product; those before any of the second
};

}  // namespace moecomm
