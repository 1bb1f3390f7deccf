// Publishes this rank's rows, before and concurrently with the dispatch of a fused layer.  The dispatch may be launched while this kernel
// runs: it reads nothing that is written here, and signals no peer before this kernel has ended (dispatch/descriptors.cuh).
#pragma once
#include "../device/quantize.cuh"
#include "layer.cuh"
#include "whole_rows.cuh"

namespace moecomm {

// Copies rows without a cast.  Called by all threads of the grid.
template <RowConfig r>
MOECOMM_FN void copy_rows(const LayerArgs& a, u8* to, i32 thread, i32 threads) {
    constexpr i32 vectors = r.bytes() / 16, together = 4;
    const i64 all = static_cast<i64>(a.num_tokens) * vectors;
    for (i64 first = thread; first < all; first += static_cast<i64>(together) * threads) {
        uint4 held[together];
#pragma unroll
        for (i32 i = 0; i < together; ++i) {
            const i64 at = first + static_cast<i64>(i) * threads;
            if (at < all) held[i] = reinterpret_cast<const uint4*>(a.x + at / vectors * a.x_stride)[at % vectors];
        }
#pragma unroll
        for (i32 i = 0; i < together; ++i) {
            const i64 at = first + static_cast<i64>(i) * threads;
            if (at < all) reinterpret_cast<uint4*>(to)[at] = held[i];
        }
    }
}

// Casts rows as a dispatch does.  Called by all warps of the grid; a warp casts a piece of 2 * kStepColumns columns at a time.
template <RowConfig r, Type given>
MOECOMM_FN void cast_rows(const LayerArgs& a, u8* to, i32 warp, i32 warps) {
    constexpr i32 most = 2 * kStepColumns, pieces = ceil_div(r.hidden, most);
    for (i32 item = warp; item < a.num_tokens * pieces; item += warps) {
        const i32 token = item / pieces, column = item % pieces * most;
        u8* const row = to + static_cast<i64>(token) * r.pitch();
        const u8* const from = reinterpret_cast<const u8*>(a.x + token * a.x_stride) + column * bytes_of(given);
        quantize_piece<given, ScaleFormat::fp32, r.hidden, most, 2>(column, row + column, from,
                                                                    row + r.columns_bytes() + column / kScaleGroup * 4);
    }
}

constexpr i32 kPublishedPieces = 8;  // of a row, that a lane keeps in registers

// Casts rows with one scale each.  Called by all warps of the grid, one a row.
template <RowConfig r, Type given>
MOECOMM_FN void cast_whole_rows(const LayerArgs& a, u8* to, i32 warp, i32 warps) {
    for (i32 token = warp; token < a.num_tokens; token += warps) {
        u8* const row = to + static_cast<i64>(token) * r.pitch();
        cast_whole_row<given, row_format(r.integers), kPublishedPieces, false>(
            reinterpret_cast<const u8*>(a.x + token * a.x_stride), r.hidden, row, reinterpret_cast<float*>(row + r.columns_bytes()));
    }
}

// The kernel, with any number of blocks of kPublishThreads threads: resets the layer's counters and `failed`, and publishes rows of type
// `given`.  Waits for no peer and cannot fail.
template <RowConfig r, Type given>
MOECOMM_FN void publish_rows(const LayerArgs& a) {
    const i32 thread = blockIdx.x * kPublishThreads + threadIdx.x, threads = gridDim.x * kPublishThreads;
    await_earlier_kernels();
    MOECOMM_LAYER_SPAN(publish, a.ctx, threadIdx.x == 0);
    launch_dependents();
    for (i32 i = thread; i < ceil_div(a.max_rows, kLeastCounted); i += threads) reinterpret_cast<u32*>(a.fetched)[i] = 0;
    for (i32 i = thread; i < a.row_tiles; i += threads) reinterpret_cast<u32*>(a.tile_done)[i] = 0;
    if (thread == 0) *reinterpret_cast<u32*>(a.failed) = *reinterpret_cast<u32*>(a.next_tile) = *reinterpret_cast<u32*>(a.next_row) = 0;
    u8* const published = reinterpret_cast<u8*>(a.ctx.peers[a.ctx.rank] + a.published);
    if constexpr (r.whole) {
        cast_whole_rows<r, given>(a, published, thread / kWarp, threads / kWarp);
    } else if constexpr (r.scaled()) {
        cast_rows<r, given>(a, published, thread / kWarp, threads / kWarp);
    } else {
        copy_rows<r>(a, published, thread, threads);
    }
    fence_system();  // orders the rows before the dispatch's signals to peers
}

}  // namespace moecomm
