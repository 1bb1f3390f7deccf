// Roles of all_gather_matmul that move rows between ranks: the warps of the loader warpgroup that load no tiles.
#pragma once
#include "round.cuh"
#include "vectors.cuh"

namespace moecomm {

// Pushes this rank's rows into the staging of all others, in pieces, and raises the flag of each. A whole warp, number `warp` of `warps`.
// Nearest destinations in ring order come last: rank r multiplies the rows of r + 1 first, so r sends to r - 1 first. Cannot fail.
//
// Rows are pushed, not pulled: a pull would wait for a flag and then for a read, two trips over the link, and each column tile would read
// the rows over the link again. Pushed rows cross it once, and land in the L2 cache of the rank that multiplies them.
MOECOMM_FN void push_rows(const GatherMatmulArgs& a, const OverlapRound& round, i32 warp, i32 warps) {
    const i32 ranks = a.overlap.window.ranks, rank = round.rank(), rows = a.gemm.grouping.group_rows;
    const i64 row_bytes = static_cast<i64>(a.gemm.depth) * 2;
    for (i32 item = warp; item < (ranks - 1) * a.pieces; item += warps) {
        const i32 to = (rank + ranks - 1 - item / a.pieces) % ranks, piece = item % a.pieces, row = piece * a.piece_rows;
        const i64 from = row * row_bytes;
        copy_vectors<false>(round.staging(to) + rank * rows * row_bytes + from, a.x + from, min(a.piece_rows, rows - row) * row_bytes);
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
MOECOMM_FN void copy_gathered(const GatherMatmulArgs& a, const OverlapRound& round, i32 warp, i32 warps) {
    const i32 ranks = a.overlap.window.ranks, rank = round.rank(), rows = a.gemm.grouping.group_rows;
    const i64 row_bytes = static_cast<i64>(a.gemm.depth) * 2;
    for (i32 item = warp; item < ranks * a.pieces; item += warps) {
        const i32 of = (rank + item / a.pieces) % ranks, row = item % a.pieces * a.piece_rows, count = min(a.piece_rows, rows - row);
        const i64 from = (static_cast<i64>(of) * rows + row) * row_bytes;
        if (of == rank) {
            copy_vectors<false>(a.gathered_out + from, a.x + row * row_bytes, count * row_bytes);
        } else {
            if (!RowFlags(a, round, of, row, count).await(round, of)) return;
            copy_vectors<true>(a.gathered_out + from, round.staging(rank) + from, count * row_bytes);
        }
    }
}

}  // namespace moecomm
