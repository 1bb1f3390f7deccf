// Copy the rows that hold a token.  Buffers have room for many more than arrive, and a plain copy would move all of it.
#pragma once
#include "copy_rows_args.h"
#include "padding.cuh"

namespace moecomm {

constexpr i32 kCopyInFlight = 4;  // words that a lane loads before it stores them

// Called by all lanes of a warp.
template <class Word>
MOECOMM_FN void copy_row(Word* to, const Word* from, i64 words) {
    i64 i = lane_id();
    for (; i + (kCopyInFlight - 1) * kWarp < words; i += kCopyInFlight * kWarp) {
        Word held[kCopyInFlight];
#pragma unroll
        for (i32 j = 0; j < kCopyInFlight; ++j) held[j] = from[i + j * kWarp];
#pragma unroll
        for (i32 j = 0; j < kCopyInFlight; ++j) to[i + j * kWarp] = held[j];
    }
    for (; i < words; i += kWarp) to[i] = from[i];
}

// Called by all threads of the grid, in units of 32 rows a warp: see zero_padding. Rows of an invalid round are not counted; `num_rows` may
// then be any number.
template <class Word>
MOECOMM_FN void copy_rows(const CopyRowsArgs& a) {
    const PaddingArgs& of = a.of;
    const i32 warps = all_warps(), end = of.num_rows != 0 ? *reinterpret_cast<const i32*>(of.num_rows) : of.count;
    const i64 words = of.bytes / static_cast<i64>(sizeof(Word));
    for (i32 first = first_of_warp(); first < of.count; first += warps * kWarp) {
        const i32 mine = first + lane_id() * warps;
        for (u32 full = __ballot_sync(kAllLanes, mine < of.count && has_token(of, mine, end)); full != 0; full &= full - 1) {
            const i64 at = (first + static_cast<i64>(__ffs(full) - 1) * warps) * words;
            copy_row(reinterpret_cast<Word*>(a.to) + at, reinterpret_cast<const Word*>(of.rows) + at, words);
        }
    }
}

}  // namespace moecomm
