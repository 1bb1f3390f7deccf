// Launch arguments and sizes of a grouped GEMM.  Plain C++: moecomm._native describes the structs to Python (bindings/structs.cpp).
#pragma once
#include "tiles.h"

namespace moecomm {

constexpr i32 kSlotRowBytes = 128;  // bytes of a row of x or w in a slot of the ring: the widest swizzle
constexpr i32 kWarpgroup = 128, kMathGroups = 2;
constexpr i32 kGemmThreads = (1 + kMathGroups) * kWarpgroup;  // without warpgroups that widen weights
constexpr i32 kPartColumns = 64;                              // rows of w that a warpgroup multiplies at once
constexpr i32 kMostGroups = 512;                              // shared memory holds a count for each group
constexpr i32 kRowMaps = 5;                                   // tensor maps of x, one for each box height
constexpr i32 kWeightScales = kMathGroups * 2 * 2;            // scales of w in a slot: warpgroups x parts x (gate, up)
constexpr i32 kIndexQueueBytes = 64;                          // tile_counter.cuh
constexpr i32 kTileQueueBytes = 112;                          // of tiles, not of their indices
constexpr i32 kPackedBoxes = 2;                               // boxes of x in a slot beside packed MXFP4 weights: 128 columns
constexpr i32 kPackedRowBytes = 64;                           // bytes of a row of these weights in a slot
constexpr i32 kPackedScaleBytes = 8;                          // the two words that hold the four scales of such a row
constexpr i32 kRises = 16;                                    // of packed weights beside e4m3 (widen.cuh)

// A CUtensorMap, encoded by cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
    u64 words[16];
};

struct GemmArgs {
    TensorMap w;            // [groups][columns][depth], boxes of block_columns() rows; with GemmConfig::apart the map has five dimensions,
                            // [groups][columns / 16][gate, up][8][depth], and its strides interleave the rows as they are loaded
    TensorMap x[kRowMaps];  // [rows][depth], boxes of least_box() rows, twice as many, and so on
    u64 out;                // [rows][columns], or half the columns with GemmConfig::gated
    u64 counts;             // i32[groups]: rows of each group
    i32 columns, depth;
    Grouping grouping;
    // Scaled e4m3.  x_scales: f32[rows][ceil(depth / 128)].  w_scales: f32[groups][ceil(columns / 128)][ceil(depth / 128)], in the row
    // order of w in memory.  out_scales: f32[rows][ceil(columns / 2 / 128)], where the product is cast. With GemmConfig::channel_scales,
    // x_scales: f32[rows], x_scale_row apart.  w_scales: f32[groups][columns], in the row order of w in memory.
    // With GemmConfig::mxfp4 there are w_scales only: u8[groups][columns][depth / 32].  With GemmConfig::widens(), w_scales:
    // u32[groups][ceil(depth / 128)][columns] (widen.cuh).
    u64 x_scales, w_scales, out_scales;
    i64 x_scale_row, x_scale_column;  // strides of x_scales, in elements
    u64 bias;                         // f32[groups][columns], of gated products gate columns before up columns; 0: none
    float limit, alpha;               // of activations that have them
    u64 next_tile;                    // with GemmConfig::dynamic, u32: position that a cluster takes next, 0 before the launch
};

// Warpgroups that widen packed weights (widen.cuh): two, where accumulators leave them registers.
MOECOMM_BOTH constexpr i32 widening_groups(i32 most_rows, i32 packed_stages) { return packed_stages == 0 ? 0 : most_rows > 64 ? 1 : 2; }
MOECOMM_BOTH constexpr i32 gemm_threads(i32 most_rows, i32 packed_stages) {
    return kGemmThreads + widening_groups(most_rows, packed_stages) * kWarpgroup;
}
// Rows of w that a block multiplies (columns of the product).
MOECOMM_BOTH constexpr i32 gemm_block_columns(bool scaled) { return kMathGroups * (scaled ? 2 : 1) * kPartColumns; }
// Bytes of the product that a warpgroup transposes in one step of the epilogue.
MOECOMM_BOTH constexpr i32 gemm_stage_bytes(bool scaled) { return scaled ? 4096 : 8192; }
// Dynamic shared memory of a block; gemm.cuh asserts that GemmShared fits.  `packed_stages`: GemmConfig::packed_stages.
MOECOMM_BOTH constexpr i32 gemm_shared_bytes(bool scaled, i32 most_rows, i32 stages, bool mxfp4 = false, bool dynamic = false,
                                             i32 packed_stages = 0) {
    const i32 columns = gemm_block_columns(scaled), boxes = mxfp4 ? kPackedBoxes : 1, barriers = 2 * static_cast<i32>(sizeof(u64));
    const i32 operands = columns * (mxfp4 ? kPackedRowBytes : kSlotRowBytes) + boxes * most_rows * kSlotRowBytes;
    const i32 of_weights = mxfp4 ? columns * kPackedScaleBytes : scaled ? 4 * kWeightScales : 0;
    const i32 slot = operands + of_weights + (scaled ? 4 * most_rows : 0) + barriers;
    const i32 packed =
        packed_stages > 0 ? packed_stages * (columns * (kPackedRowBytes + 4) + barriers) + kRises * 8 + 16 + kTileQueueBytes : 0;
    return stages * slot + packed + kMathGroups * 2 * gemm_stage_bytes(scaled) + kMostGroups * 4 + 16 +
           (dynamic && packed == 0 ? kIndexQueueBytes : 0);
}

}  // namespace moecomm
