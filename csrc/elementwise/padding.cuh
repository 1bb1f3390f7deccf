// Zero the rows without a token. Only these rows are touched; torch's masked_fill_ reads and writes all rows.
#pragma once
#include "args.h"
#include "row_pass.cuh"

namespace moecomm {

// True if `row` holds a token. Called by any thread.
MOECOMM_FN bool has_token(const PaddingArgs& a, i32 row, i32 end) {
    if (row >= end) return false;
    if (a.src != 0 && reinterpret_cast<const int2*>(a.src)[row].x < 0) return false;
    return a.counts == 0 || row % a.group < reinterpret_cast<const i32*>(a.counts)[row / a.group];
}

// Called by all threads of the grid, in units of 32 rows a warp: each lane checks one row, then the warp zeros the empty rows one by one.
// Empty rows are adjacent, so the rows of a warp are far from each other, which balances the load.
template <class Word>
MOECOMM_FN void zero_padding(const PaddingArgs& a) {
    const i32 warps = all_warps(), end = a.num_rows != 0 ? *reinterpret_cast<const i32*>(a.num_rows) : a.count;
    const i64 words = a.bytes / static_cast<i64>(sizeof(Word));
    for (i32 first = first_of_warp(); first < a.count; first += warps * kWarp) {
        const i32 mine = first + lane_id() * warps;
        for (u32 empty = __ballot_sync(kAllLanes, mine < a.count && !has_token(a, mine, end)); empty != 0; empty &= empty - 1) {
            Word* const row = reinterpret_cast<Word*>(a.rows) + (first + static_cast<i64>(__ffs(empty) - 1) * warps) * words;
            for (i64 i = lane_id(); i < words; i += kWarp) row[i] = Word{};
        }
    }
}

}  // namespace moecomm
