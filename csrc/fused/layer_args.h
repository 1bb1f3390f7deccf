// Launch arguments and sizes of the kernels of an expert layer.  Plain C++, described to Python like gemm/args.h.
#pragma once
#include "../gemm/args.h"
#include "../protocol/args.h"

namespace moecomm {

constexpr i32 kLeastCounted = 32;  // fewest rows of a counter of fetched rows
constexpr i32 kPublishThreads = 512;

struct LayerArgs {
    Context ctx;
    // Tokens of this rank.
    u64 x;          // [num_tokens][hidden], rows x_stride bytes apart, 16-byte aligned
    u64 published;  // the rows in the form in which they travel (RowConfig), read by peers: an offset in this rank's window
    u64 received;   // receive buffer of [num_tokens][topk] rows, written by peers: an offset in this rank's window
    u64 owners;     // i32[num_tokens][topk]: rank of the k-th expert, -1: none
    u64 weights;    // f32[num_tokens][topk]; 0: every weight is 1
    u64 bias;       // rows bias_stride bytes apart (stride 0: one row for all tokens); 0: none
    u64 out;        // [num_tokens][hidden], rows out_stride bytes apart
    i64 x_stride, bias_stride, out_stride;
    // Rows of this rank's experts.
    u64 descriptors;   // RowDescriptor[rows]
    u64 num_rows;      // i32
    u64 rows;          // [max_rows] fetched rows (RowConfig)
    u64 destinations;  // u64[max_rows]: address that each row of the second product is stored at
    u64 fetched;       // u32[]: rows fetched of each RowConfig::counted; there is a word for every kLeastCounted rows
    u64 tile_done;     // u32[]: of each row tile, column tiles of the first product that are stored
    u64 next_tile;     // u32: tile positions taken so far
    u64 next_row;      // u32: rows claimed so far by fetching warps
    u64 failed;        // u32: 1 after a wait for rows or tiles timed out, or if the dispatch failed
    i32 num_tokens, max_rows;
    i32 row_tiles;  // words from tile_done on that the publish kernel sets to 0
};

// Arguments of expert_layer.cuh.
struct ExpertLayerArgs {
    GemmArgs first, second;  // same rows, row tiles and bands; the second's x is the first's out
    LayerArgs layer;
    i32 fetchers;            // blocks, the first of the grid, that fetch before they multiply
    i32 together;            // rows that all blocks fetch first, one row a warp
    i32 lag;                 // see LaggedWalk
    i32 row_tiles_per_turn;  // see LaggedWalk
    // Where rows have one scale each, the first product is cast row by row to second.x, with second.x_scales.
    u64 cast;       // [max_rows][second.depth] of bytes
    u64 cast_done;  // u32[]: of each row tile, rows that are cast
    u64 next_cast;  // u32: shares of rows that casting warps have taken
    i32 cast_rows;  // rows of a share
};
static_assert(sizeof(ExpertLayerArgs) <= 4096 && sizeof(ExpertLayerArgs) % sizeof(u64) == 0, "what a kernel takes");

// Dynamic shared memory of a block of expert_layer.cuh, which asserts that it is enough: the GEMM's, the tile queue (320) and the barriers
// of fetching (512).
MOECOMM_BOTH constexpr i32 expert_layer_shared_bytes(bool scaled, i32 most_rows, i32 stages, i32 packed_stages = 0) {
    return gemm_shared_bytes(scaled, most_rows, stages, false, false, packed_stages) + 320 + 512;
}
// Bytes of a slot of reduce.cuh, which asserts that they are enough: topk rows and a bias, entries of 16 bytes, alignment.
MOECOMM_BOTH constexpr i32 reduce_slot_bytes(i32 topk, i32 piece_bytes) { return (topk + 1) * piece_bytes + 16 * topk + 128; }

}  // namespace moecomm
