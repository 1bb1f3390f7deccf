// Roles of all_gather_matmul that move rows between ranks: the warps of the loader warpgroup that load no tiles.
#pragma once
#include "../gemm/config.cuh"
#include "round.cuh"
#include "vectors.cuh"

namespace moecomm {

// Rows of x with their scales: those of this rank, or of all ranks in a staging or in the gathered result.
struct PlacedRows {
    u64 x, scales;  // scales: 0 for types without
};
MOECOMM_FN PlacedRows own_rows(const GatherMatmulArgs& a) { return {a.x, a.gemm.x_scales}; }
MOECOMM_FN PlacedRows staged_rows(const GatherMatmulArgs& a, const OverlapRound& round, i32 of) {
    return {round.staging(of), round.staging(of) + a.scales};
}

// Copies `count` rows and their scales. A whole warp; unordered. `fresh`: others write the source during this launch.
template <GemmConfig c, bool fresh>
MOECOMM_FN void copy_rows(const GatherMatmulArgs& a, const PlacedRows& to, i64 to_row, const PlacedRows& from, i64 from_row, i32 count) {
    const i64 row_bytes = static_cast<i64>(a.gemm.depth) * bytes_of(c.type);
    copy_vectors<fresh>(to.x + to_row * row_bytes, from.x + from_row * row_bytes, count * row_bytes);
    if constexpr (c.scaled()) {
        const i64 scales = a.gemm.depth / kScaleGroup;
        copy_words<fresh>(to.scales + to_row * scales * 4, from.scales + from_row * scales * 4, count * scales);
    }
}

// Pushes this rank's rows into the staging of all others, in pieces, and raises the flag of each. A whole warp, number `warp` of `warps`.
// Nearest destinations in ring order come last: rank r multiplies the rows of r + 1 first, so r sends to r - 1 first. Cannot fail.
//
// Rows are pushed, not pulled: a pull would wait for a flag and then for a read, two trips over the link, and each column tile would read
// the rows over the link again. Pushed rows cross it once, and land in the L2 cache of the rank that multiplies them.
template <GemmConfig c>
MOECOMM_FN void push_rows(const GatherMatmulArgs& a, const OverlapRound& round, i32 warp, i32 warps) {
    const i32 ranks = a.overlap.window.ranks, rank = round.rank(), rows = a.gemm.grouping.group_rows;
    for (i32 item = warp; item < (ranks - 1) * a.pieces; item += warps) {
        const i32 to = (rank + ranks - 1 - item / a.pieces) % ranks, piece = item % a.pieces, row = piece * a.piece_rows;
        copy_rows<c, false>(a, staged_rows(a, round, to), static_cast<i64>(rank) * rows + row, own_rows(a), row,
                            min(a.piece_rows, rows - row));
        __syncwarp();
        if (lane_id() == 0) store_release(round.flag(to, rank * a.pieces + piece), round.number);
    }
}

// The flags of a rank's pieces that cover some rows of its block.
struct RowFlags {
    const u64* first;
    i32 count;

    MOECOMM_FN RowFlags(const GatherMatmulArgs& a, const OverlapRound& round, i32 rank, i32 row, i32 rows)
        : first(round.flag(round.rank(), rank * a.pieces + row / a.piece_rows)),
          count((row + rows - 1) / a.piece_rows - row / a.piece_rows + 1) {}
    // Returns whether the rows are here, or waits for them; false on failure. A whole warp; acquire.
    MOECOMM_FN bool have(const OverlapRound& round) const {
        return round.have(count, [&](i32 i) { return first + i; });
    }
    MOECOMM_FN bool await(const OverlapRound& round, i32 rank) const {
        return round.await(count, [&](i32 i) { return first + i; }, [&](i32) { return rank; });
    }
};

// Copies the rows of all ranks to the gathered result, as they arrive. As push_rows(); stops on failure, which is then reported.
template <GemmConfig c>
MOECOMM_FN void copy_gathered(const GatherMatmulArgs& a, const OverlapRound& round, i32 warp, i32 warps) {
    const i32 ranks = a.overlap.window.ranks, rank = round.rank(), rows = a.gemm.grouping.group_rows;
    const PlacedRows out{a.gathered_out, a.gathered_scales_out};
    for (i32 item = warp; item < ranks * a.pieces; item += warps) {
        const i32 of = (rank + item / a.pieces) % ranks, row = item % a.pieces * a.piece_rows, count = min(a.piece_rows, rows - row);
        const i64 at = static_cast<i64>(of) * rows + row;
        if (of == rank) {
            copy_rows<c, false>(a, out, at, own_rows(a), row, count);
        } else {
            if (!RowFlags(a, round, of, row, count).await(round, of)) return;
            copy_rows<c, true>(a, out, at, staged_rows(a, round, rank), at, count);
        }
    }
}

}  // namespace moecomm
