// Roles of matmul_send that turn what has arrived in staging into the result. Warps of all blocks take slices of tiles from a counter, in
// the order in which tiles are computed.
#pragma once
#include "../gemm/gemm.cuh"
#include "round.cuh"
#include "send_tiles.h"
#include "vectors.cuh"

namespace moecomm {

template <GemmConfig c>
constexpr i32 kTileRowBytes = c.block_columns() * bytes_of(c.out);  // in staging
template <GemmConfig c>
constexpr i32 kRowLanes = kTileRowBytes<c> / 16;  // lanes of a row of a tile
constexpr i32 kCollected = 4;                     // loads of a lane in flight
enum ReduceCounter : i32 { kPartsCounter, kReducedCounter };
constexpr i32 kReducedWarp = 3;  // of a block: it collects no parts of an all-reduce

template <GemmConfig c, Send send, i32 ranks, i32 split = 1>
MOECOMM_FN SendTiles<send, ranks> send_tiles(const SendMatmulArgs& a) {
    return {a, c.cluster, kTileRowBytes<c>, split};
}

// One slice of a tile, whose columns are those of one block of a cluster.
struct Slice {
    i32 row;  // first, in the tile
    i32 rows;
    i32 column;  // first, in the result
};
template <GemmConfig c>
MOECOMM_FN Slice slice_of(const BlockTile& found, i32 of_cluster, i32 slice) {
    const i32 row = slice * kSliceRows;
    return {row, min(kSliceRows, found.tile.rows - row), block_of<c>(found.tile, of_cluster) * c.block_columns()};
}

// For this lane's vectors of 16 bytes of a slice, `together` at a time: load(i, at) all of them, then store(i, at, to). `at` is the offset
// of a vector in a staged tile, `to` in the result. A whole warp. `result_row`: see SendTiles.
template <GemmConfig c, i32 together, class Load, class Store>
MOECOMM_FN void for_vectors(const Slice& slice, const BlockTile& found, i32 result_row, i32 columns, const Load& load, const Store& store) {
    constexpr i32 step = kWarp / kRowLanes<c>;  // rows of a warp
    const i32 chunk = lane_id() % kRowLanes<c>, column = slice.column + chunk * 8, end = slice.row + slice.rows;
    if (column >= columns) return;
    for (i32 first = slice.row + lane_id() / kRowLanes<c>; first < end; first += together * step) {
#pragma unroll
        for (i32 i = 0; i < together; ++i)
            if (first + i * step < end) load(i, (first + i * step) * kTileRowBytes<c> + chunk * 16);
#pragma unroll
        for (i32 i = 0; i < together; ++i) {
            const i32 row = first + i * step;
            if (row < end)
                store(i, row * kTileRowBytes<c> + chunk * 16, (static_cast<i64>(result_row + found.tile.row + row) * columns + column) * 2);
        }
    }
}
// Copies a slice of a staged tile to the result. As for_vectors().
template <GemmConfig c>
MOECOMM_FN void copy_slice(const Slice& slice, const BlockTile& found, i32 result_row, i32 columns, u64 staged, u64 out) {
    uint4 held[kCollected];
    for_vectors<c, kCollected>(
        slice, found, result_row, columns, [&](i32 i, i32 at) { held[i] = load_vector(staged + at); },
        [&](i32 i, i32, i64 to) { store_vector(out + to, held[i]); });
}

// Adds up the parts of this rank's units, in rank order, in float32, rounded once. A whole warp. All-reduce: sends the sums to all ranks.
// Returns at once on failure, which end() reports.
template <GemmConfig c, Send send, i32 ranks, i32 split>
MOECOMM_FN void collect_sums(const SendMatmulArgs& a, const OverlapRound& round) {
    const auto tiles = send_tiles<c, send, ranks, split>(a);
    const i32 rank = round.rank(), items = tiles.parts(rank) * a.slices, columns = a.gemm.columns;
    for (i32 item = round.take(kPartsCounter); item < items; item = round.take(kPartsCounter)) {
        const i32 part = item / a.slices, index = part / c.cluster * ranks + rank, of_cluster = part % c.cluster;
        BlockTile found;
        tiles.find(index, found);
        const Slice slice = slice_of<c>(found, of_cluster, item % a.slices);
        if (slice.rows <= 0 || slice.column >= columns) continue;
        const u64* const flags = round.flag(rank, tiles.staged_flag(part, 0));
        if (!round.await(ranks * split, [&](i32 i) { return flags + i; }, [](i32 i) { return i / split; })) return;
        const u64 staged = round.staging(rank) + tiles.staged(part, 0), pitch = tiles.staged(0, 1);
        constexpr i32 together = ranks < 3 ? 2 : 1;  // rows; more would not fit the registers of the loader warpgroup
        uint4 held[together][ranks];
        const auto load = [&](i32 i, i32 at) {
#pragma unroll
            for (i32 source = 0; source < ranks; ++source) held[i][source] = load_vector(staged + at + source * pitch);
        };
        const auto store = [&](i32 i, i32 at, i64 to) {
            float sums[8] = {};
#pragma unroll
            for (i32 source = 0; source < ranks; ++source) add_eight<c.out>(sums, held[i][source]);
            const uint4 sum = narrow_all<c.out>(sums);
            store_vector(a.gemm.out + to, sum);
            if constexpr (send == Send::all_reduce) {
                // Destinations are computed again for each vector: kept, they would take registers.
#pragma unroll 1
                for (i32 to_rank = 0; to_rank < ranks; ++to_rank)
                    if (to_rank != rank) store_vector(round.staging(to_rank) + tiles.reduced(index, of_cluster) + at, sum);
            }
        };
        for_vectors<c, together>(slice, found, tiles.result_row(found, rank), columns, load, store);
        if constexpr (send == Send::all_reduce) {
            __syncwarp();
            if (lane_id() < ranks && lane_id() != rank)
                store_release(round.flag(lane_id(), tiles.reduced_flag(index, of_cluster, item % a.slices)), round.number);
        }
    }
}

// All-to-all: copies the parts of this rank's units. As collect_sums(). Tiles that stay on this rank are stored in the result at once.
template <GemmConfig c, i32 ranks>
MOECOMM_FN void collect_copies(const SendMatmulArgs& a, const OverlapRound& round) {
    const auto tiles = send_tiles<c, Send::all_to_all, ranks>(a);
    const i32 rank = round.rank(), of_source = a.slices, of_part = of_source * (ranks - 1), columns = a.gemm.columns;
    const i32 items = tiles.parts(rank) * of_part;
    for (i32 item = round.take(kPartsCounter); item < items; item = round.take(kPartsCounter)) {
        const i32 part = item / of_part, index = part / c.cluster * ranks + rank;
        const i32 source = (rank + 1 + item % of_part / of_source) % ranks;
        BlockTile found;
        tiles.find(index, found);
        const Slice slice = slice_of<c>(found, part % c.cluster, item % of_source);
        if (slice.rows <= 0 || slice.column >= columns) continue;
        const u64* const flag = round.flag(rank, tiles.staged_flag(part, source));
        if (!round.await(1, [&](i32) { return flag; }, [&](i32) { return source; })) return;
        const u64 staged = round.staging(rank) + tiles.staged(part, source);
        copy_slice<c>(slice, found, tiles.result_row(found, source), columns, staged, a.gemm.out);
    }
}

// All-reduce: copies the sums that other ranks have sent to the result. As collect_sums().
template <GemmConfig c, i32 ranks, i32 split>
MOECOMM_FN void collect_reduced(const SendMatmulArgs& a, const OverlapRound& round) {
    const auto tiles = send_tiles<c, Send::all_reduce, ranks, split>(a);
    const i32 rank = round.rank(), items = tiles.count() * c.cluster * a.slices, columns = a.gemm.columns;
    for (i32 item = round.take(kReducedCounter); item < items; item = round.take(kReducedCounter)) {
        const i32 of_cluster = item / a.slices % c.cluster, index = item / a.slices / c.cluster, owner = tiles.destination(index);
        BlockTile found;
        tiles.find(index, found);
        const Slice slice = slice_of<c>(found, of_cluster, item % a.slices);
        if (owner == rank || slice.rows <= 0 || slice.column >= columns) continue;
        const u64* const flag = round.flag(rank, tiles.reduced_flag(index, of_cluster, item % a.slices));
        if (!round.await(1, [&](i32) { return flag; }, [&](i32) { return owner; })) return;
        const u64 from = round.staging(rank) + tiles.reduced(index, of_cluster);
        copy_slice<c>(slice, found, 0, columns, from, a.gemm.out);
    }
}

// The items that the warps of a kernel collect: first the parts, then, if they may, what other ranks have reduced. Waits for parts end
// without the help of any collecting warp, and waits for reduced tiles need only warps that collect parts, so warps of both kinds never
// wait in a circle.
template <GemmConfig c, Send send, i32 ranks, i32 split>
MOECOMM_FN void collect(const SendMatmulArgs& a, const OverlapRound& round) {
    if constexpr (send == Send::all_to_all) {
        collect_copies<c, ranks>(a, round);
    } else if constexpr (send == Send::reduce_scatter) {
        collect_sums<c, send, ranks, split>(a, round);
    } else {
        if (warp_id() != kReducedWarp) collect_sums<c, send, ranks, split>(a, round);
        collect_reduced<c, ranks, split>(a, round);
    }
}

}  // namespace moecomm
