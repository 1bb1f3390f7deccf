// embedding_all_to_all in one launch. Warps take pieces of a destination's bags, the nearest destinations in ring order first and this
// rank's own last. They add up the rows of each bag in float32, store it in the destination's staging (this rank's own: in the result), and
// raise the flag of the piece. Warps that find no more pieces copy what has arrived to the result.
//
// A lane adds up 16 bytes of a bag, with the rows of several indices in flight. A bag of fewer than 512 bytes takes part of a warp, and the
// warp has several bags at a time.
//
// Order: a warp's stores come before its flag (release at system scope, after __syncwarp); a warp that copies acquires the flag, and reads
// staging past L1. Waits are only for pieces, which no rank ever waits to compute.
#pragma once
#include "round.cuh"
#include "vectors.cuh"

namespace moecomm {

enum EmbeddingCounter : i32 { kPiecesCounter, kCopiesCounter };

// The bags of a piece: `bags` from `first` on, of a destination's num_tables * batch bags.
struct Piece {
    i32 rank;  // destination, or source
    i32 index, first, bags;
};
MOECOMM_FN Piece piece_of(const EmbeddingArgs& a, i32 first_rank, i32 item) {
    const i32 index = item % a.pieces, first = index * a.piece_bags;
    return {(first_rank + item / a.pieces) % a.overlap.window.ranks, index, first, min(a.piece_bags, a.num_tables * a.batch - first)};
}

// Indices of a bag: `count` from `first` on.
struct Bag {
    u64 table;  // address
    i64 first, end;
};
MOECOMM_FN Bag bag_of(const EmbeddingArgs& a, i32 rank, i32 bag, i64 row_bytes) {
    const i32 table = bag / a.batch;
    const i64 all = (static_cast<i64>(table) * a.overlap.window.ranks + rank) * a.batch + bag % a.batch;
    const u64 at = a.tables + table * a.num_rows * row_bytes;
    if (a.offsets == 0) return {at, all * a.pooling, (all + 1) * a.pooling};
    const auto* const offsets = reinterpret_cast<const i64*>(a.offsets) + all;
    return {at, max(offsets[0], 0ll), min(offsets[1], a.num_indices)};
}

// Returns 16 bytes of the sum of a bag's rows, in the order of indices, rounded once. An index that is no row counts as none. Any lane.
template <Type type>
MOECOMM_FN uint4 sum_of_bag(const EmbeddingArgs& a, const Bag& bag, i64 row_bytes, i32 chunk) {
    constexpr i32 each = columns_in_16(type), together = 4;  // columns; rows in flight
    const auto* const indices = reinterpret_cast<const i64*>(a.indices);
    float sums[each] = {};
    for (i64 from = bag.first; from < bag.end; from += together) {
        i64 row[together];
        uint4 held[together];
#pragma unroll
        for (i32 i = 0; i < together; ++i) row[i] = from + i < bag.end ? indices[from + i] : -1;
#pragma unroll
        for (i32 i = 0; i < together; ++i) {
            if (row[i] >= a.num_rows) row[i] = -1;
            if (row[i] >= 0) held[i] = *reinterpret_cast<const uint4*>(bag.table + row[i] * row_bytes + chunk * 16);
        }
#pragma unroll
        for (i32 i = 0; i < together; ++i) {
            if (row[i] < 0) continue;
            float wide[each];
            widen<type>(held[i], wide);
#pragma unroll
            for (i32 column = 0; column < each; ++column) sums[column] = __fadd_rn(sums[column], wide[column]);
        }
    }
    constexpr i32 of_word = each / 4;
    return make_uint4(narrow_word<type>(sums), narrow_word<type>(sums + of_word), narrow_word<type>(sums + 2 * of_word),
                      narrow_word<type>(sums + 3 * of_word));
}

// Adds up the bags of a piece, and stores them from `to` on. A whole warp.
template <Type type>
MOECOMM_FN void make_piece(const EmbeddingArgs& a, const Piece& piece, u64 to) {
    const i32 row_bytes = a.columns * bytes_of(type), chunks = row_bytes / 16;
    i32 lanes = kWarp;  // of a bag
    while (lanes / 2 >= chunks) lanes /= 2;
    const i32 lane = lane_id() % lanes;
    for (i32 i = lane_id() / lanes; i < piece.bags; i += kWarp / lanes) {
        const Bag bag = bag_of(a, piece.rank, piece.first + i, row_bytes);
        for (i32 chunk = lane; chunk < chunks; chunk += lanes)
            store_vector(to + static_cast<i64>(i) * row_bytes + chunk * 16, sum_of_bag<type>(a, bag, row_bytes, chunk));
    }
}

// The kernel: all threads of all blocks, at most one block a multiprocessor. All waits have the Window's deadline.
template <Type type>
MOECOMM_FN void embedding_all_to_all(const EmbeddingArgs& a) {
    await_earlier_kernels();
    launch_dependents();
    const OverlapRound round(a.overlap);
    const i32 ranks = a.overlap.window.ranks, rank = round.rank();
    const i64 row_bytes = static_cast<i64>(a.columns) * bytes_of(type), of_rank = row_bytes * a.num_tables * a.batch;
    for (i32 item = round.take(kPiecesCounter); item < ranks * a.pieces; item = round.take(kPiecesCounter)) {
        const Piece piece = piece_of(a, rank + 1, item);
        const u64 result = piece.rank == rank ? a.out : round.staging(piece.rank);
        make_piece<type>(a, piece, result + rank * of_rank + piece.first * row_bytes);
        if (piece.rank == rank) continue;
        __syncwarp();
        if (lane_id() == 0) store_release(round.flag(piece.rank, rank * a.pieces + piece.index), round.number);
    }
    for (i32 item = round.take(kCopiesCounter); item < (ranks - 1) * a.pieces; item = round.take(kCopiesCounter)) {
        const Piece piece = piece_of(a, rank + 1, item);
        const u64* const flag = round.flag(rank, piece.rank * a.pieces + piece.index);
        if (!round.await(1, [&](i32) { return flag; }, [&](i32) { return piece.rank; })) break;
        const i64 from = piece.rank * of_rank + piece.first * row_bytes;
        copy_vectors<true>(a.out + from, round.staging(rank) + from, piece.bags * row_bytes);
    }
    round.end();
}

}  // namespace moecomm
