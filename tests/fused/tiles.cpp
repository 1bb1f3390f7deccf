// csrc/fused/tiles.h as a library that ctypes can call.
#include "fused/tiles.h"

using namespace moecomm;

// The numbers of the tiles that `cluster` makes, at most `room`; returns how many.
extern "C" i32 dealt(const Grouping* grouping, const i32* counts, const Deal* deal, i32 cluster, i32* out, i32 room) {
    const i32 all = TileWalk::count(*grouping, counts);
    i32 found = 0;
    for (i32 tile = deal->first(cluster); tile < all && found < room; tile = deal->next(cluster, tile)) out[found++] = tile;
    return found;
}

// The tiles that `walker` of `walkers` makes, six numbers each, at most `room`; returns how many.
extern "C" i32 tiles_of(const Grouping* grouping, const i32* counts, i32 walker, i32 walkers, i32* out, i32 room) {
    TileWalk walk(*grouping, counts);
    i32 found = 0;
    for (Tile tile; walk.find(walker + found * walkers, tile) && found < room; ++found) {
        const i32 row[] = {tile.group, tile.row, tile.rows, tile.padded, tile.column, tile.alone};
        for (i32 i = 0; i < 6; ++i) out[6 * found + i] = row[i];
    }
    return found;
}
