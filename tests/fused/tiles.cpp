// csrc/gemm/tiles.h and lagged.h as a library that ctypes can call.
#include "fused/lagged.h"

using namespace moecomm;

namespace {

constexpr i32 kNumbers = 7;
void write(const Tile& tile, i32* out) {
    const i32 numbers[kNumbers] = {tile.group, tile.row, tile.rows, tile.padded, tile.column, tile.only_row_tile, tile.nth};
    for (i32 i = 0; i < kNumbers; ++i) out[i] = numbers[i];
}

}  // namespace

// The tiles that `walker` of `walkers` makes, seven numbers each, at most `room`; returns how many.
extern "C" i32 tiles_of(const Grouping* grouping, const i32* counts, i32 walker, i32 walkers, i32* out, i32 room) {
    TileWalk walk(*grouping, counts);
    i32 found = 0;
    for (Tile tile; walk.find(walker + found * walkers, tile) && found < room; ++found) write(tile, out + kNumbers * found);
    return found;
}

// The tiles of two products in one launch, position by position, at most `room`: which of the two before each.  Returns how many.
extern "C" i32 lagged(const Grouping* first, const Grouping* second, const i32* counts, i32 lag, i32 turn, i32* out, i32 room) {
    LaggedWalk walk(*first, *second, counts, TileWalk::count_rows(*first, counts), lag, turn);
    i32 found = 0;
    bool is_second = false;
    for (Tile tile; walk.find(found, tile, is_second) && found < room; ++found) {
        out[(1 + kNumbers) * found] = is_second;
        write(tile, out + (1 + kNumbers) * found + 1);
    }
    return found;
}
