// What the kernels of an expert layer are told when they are launched, and their sizes.  Plain C++: see gemm_args.h.
#pragma once
#include "../gemm/args.h"
#include "../protocol/args.h"

namespace moecomm {

constexpr i32 kLeastCounted = 32;  // rows of a counter
constexpr i32 kPublishThreads = 512;

struct LayerArgs {
    Context ctx;
    // Of our own tokens.
    u64 x;          // [num_tokens][hidden], rows x_stride bytes apart, 16-byte aligned
    u64 published;  // the same rows as they travel (RowConfig), for peers: an offset in our window
    u64 received;   // [num_tokens][topk] rows, by peers: an offset in our window
    u64 owners;     // i32[num_tokens][topk]: rank of the k-th expert, -1: none
    u64 weights;    // f32[num_tokens][topk]; 0: every weight is 1
    u64 bias;       // rows bias_stride bytes apart (0: one for all); 0: none
    u64 out;        // [num_tokens][hidden], rows out_stride bytes apart
    i64 x_stride, bias_stride, out_stride;
    // Of the rows that our experts get.
    u64 descriptors;   // RowDescriptor[rows]
    u64 num_rows;      // i32
    u64 rows;          // [max_rows]: the rows themselves (RowConfig), once they are fetched
    u64 destinations;  // u64[max_rows]: the address that each row that the experts make goes to
    u64 fetched;       // u32[]: of every RowConfig::counted rows, how many are there; words for every kLeastCounted
    u64 tile_done;     // u32[]: of every row tile, how often a block has made columns of it in the first GEMM
    u64 next_tile;     // u32: positions of tiles that have been taken
    u64 next_row;      // u32: rows that have been claimed by who fetches them
    u64 failed;        // u32: 1 where rows or tiles did not come in time, or the dispatch has failed
    i32 num_tokens, max_rows;
    i32 row_tiles;  // that there are words for
};

// Of expert_layer.cuh.
struct ExpertLayerArgs {
    GemmArgs first, second;  // of the same rows, row tiles and bands; the second's x is the first's out
    LayerArgs layer;
    i32 fetchers;       // blocks, the first ones, that fetch before they multiply
    i32 together;       // rows that all blocks fetch before that, a warp one
    i32 lag;            // LaggedWalk
    i32 rotation_step;  // LaggedWalk
};
static_assert(sizeof(ExpertLayerArgs) <= 4096 && sizeof(ExpertLayerArgs) % sizeof(u64) == 0, "what a kernel takes");

// Dynamic shared memory of a block of expert_layer.cuh, which asserts that it is enough: beside the GEMM's, the queue of tiles and what
// fetching takes.
MOECOMM_BOTH constexpr i32 expert_layer_shared_bytes(bool scaled, i32 most_rows, i32 stages) {
    return gemm_shared_bytes(scaled, most_rows, stages) + 320 + 512;
}
// Of a slot of reduce.cuh, which asserts the same: rows and a bias, entries of 16 bytes, and what aligns them.
MOECOMM_BOTH constexpr i32 reduce_slot_bytes(i32 topk, i32 piece_bytes) { return (topk + 1) * piece_bytes + 16 * topk + 128; }

}  // namespace moecomm
