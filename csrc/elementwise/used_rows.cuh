// Passes over rows of which some hold no token: zero these, or copy the others, or a dispatch's metadata.
#pragma once
#include "row_pass.cuh"

namespace moecomm {

// True if `row` holds a token. Called by any thread.
MOECOMM_FN bool has_token(const PaddingArgs& a, i32 row, i32 end) {
    if (row >= end) return false;
    if (a.src != 0 && reinterpret_cast<const int2*>(a.src)[row].x < 0) return false;
    return a.counts == 0 || row % a.group < reinterpret_cast<const i32*>(a.counts)[row / a.group];
}

// Zero the rows without a token. Only these rows are touched; torch's masked_fill_ reads and writes all rows. Called by all threads of the
// grid, in units of 32 rows a warp: each lane checks one row, then the warp zeros the empty rows one by one.
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

// Copy the rows that hold a token. Buffers have room for many more than arrive, and a plain copy would move all of it. Called by all
// threads of the grid, in units of 32 rows a warp: see zero_padding. Rows of an invalid round are not counted; `num_rows` may then be any
// number.
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

// Copy a dispatch's metadata out of the window into tensors, with zeros and -1 in rows without a token, and zero these rows themselves.
// Called by all threads of the grid: one weight, and its id, a thread; then as zero_padding.
template <class Id, class Word>
MOECOMM_FN void tidy(const TidyArgs& a) {
    const i32 thread = blockIdx.x * kPassThreads + threadIdx.x, threads = gridDim.x * kPassThreads;
    const i32 end = a.of.num_rows != 0 ? *reinterpret_cast<const i32*>(a.of.num_rows) : a.of.count;
    for (i64 i = thread; i < static_cast<i64>(a.of.count) * a.each; i += threads) {
        const i32 row = static_cast<i32>(i / a.each);
        const bool has = has_token(a.of, row, end);
        reinterpret_cast<float*>(a.to_weights)[i] = has ? reinterpret_cast<const float*>(a.weights)[i] : 0.0f;
        if (a.ids != 0) reinterpret_cast<Id*>(a.to_ids)[i] = has ? reinterpret_cast<const Id*>(a.ids)[i] : -1;
        if (i % a.each == 0) reinterpret_cast<int2*>(a.to_src)[row] = has ? reinterpret_cast<const int2*>(a.src)[row] : make_int2(-1, -1);
    }
    for (i32 i = thread; i < a.experts; i += threads) reinterpret_cast<i32*>(a.to_counts)[i] = reinterpret_cast<const i32*>(a.counts)[i];
    if (thread == 0) *reinterpret_cast<i32*>(a.to_num_rows) = *reinterpret_cast<const i32*>(a.num_rows);
    if (a.of.rows != 0) zero_padding<Word>(a.of);
}

}  // namespace moecomm
