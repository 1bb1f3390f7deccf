// What a grouped GEMM is compiled for, and what it is told when it is launched.  moecomm/fused/kernels.py writes the one and packs the
// other.
#pragma once
#include "../device/config.cuh"
#include "tensor.cuh"
#include "tiles.h"

namespace moecomm {

constexpr i32 kSlotRowBytes = 128;  // of x and w, in a slot of the ring: the widest swizzle
constexpr i32 kWarpgroup = 128, kMathGroups = 2;
constexpr i32 kPartColumns = 64;  // rows of w that a warpgroup multiplies at once
constexpr i32 kWoven = 8;         // gate rows before their up rows
constexpr i32 kMostGroups = 512;  // their counts lie in shared memory
constexpr i32 kRowMaps = 5;       // heights of boxes of x
constexpr i32 kScaleGroup = 128;  // columns of x, rows and columns of w, that share a scale

struct GemmConfig {
    Type type;      // of x and w; e4m3 has scales
    Type out;       // e4m3: what bf16 would be, cast, with scales
    bool swiglu;    // out = silu(gate) * up, of rows of w that lie interleaved by kWoven in the ring ...
    bool apart;     // ... and, in memory, all gate rows before all up rows
    i32 row_unit;   // of the rows of a tile: 16 or a multiple of it
    i32 most_rows;  // of a tile, a multiple of row_unit
    i32 stages;     // slots of the ring
    i32 cluster;    // blocks that multiply the same rows with neighbouring columns: each loads its part of the rows for all
    bool swapped;   // w is what the instruction takes as rows, x as columns; or, of e4m3, as they are named (scaled_rows.cuh)
    i32 shared_bytes;
    bool helped;  // some blocks, GemmArgs::helpers, begin with something else

    MOECOMM_BOTH constexpr bool scaled() const { return type == Type::e4m3; }
    // Times kPartColumns that a warpgroup multiplies with, one after the other.  Of e4m3 two: the 128 columns of a product that share a
    // scale are then those of one block, also after SwiGLU.
    MOECOMM_BOTH constexpr i32 parts() const { return scaled() ? 2 : 1; }
    MOECOMM_BOTH constexpr i32 block_columns() const { return kMathGroups * parts() * kPartColumns; }  // rows of w
    MOECOMM_BOTH constexpr i32 depth() const { return kSlotRowBytes / bytes_of(type); }                // columns of x and w, in a slot
    MOECOMM_BOTH constexpr i32 weight_bytes() const { return block_columns() * kSlotRowBytes; }        // of w, in a slot
    MOECOMM_BOTH constexpr i32 row_bytes() const { return most_rows * kSlotRowBytes; }                 // of x, in a slot
    // Of product that a warpgroup turns at once; two places, so that each is met for once.
    MOECOMM_BOTH constexpr i32 stage_bytes() const { return scaled() ? 4096 : 8192; }
    MOECOMM_BOTH constexpr i32 least_box() const { return row_unit / cluster; }  // rows that the first of the maps loads
};

struct GemmArgs {
    TensorMap w;            // [groups][columns][depth], boxes of block_columns(); apart: [groups][columns / 16][gate, up][8][depth],
                            // as many rows, which the strides of the map put where the interleaved ones would be
    TensorMap x[kRowMaps];  // [rows][depth], boxes of least_box() rows, twice as many, and so on
    u64 out;                // [rows][columns], or half the columns with swiglu
    u64 counts;             // i32[groups]: rows of each group
    i32 columns, depth;
    Grouping grouping;
    // Blocks that begin with something else, whole clusters, and of the tiles those that are not theirs, in 1024ths.
    i32 helpers, early;
    // Of e4m3: f32[rows][ceil(depth / 128)], so many elements from row to row and from column to column; f32[groups][ceil(columns / 128)]
    // [ceil(depth / 128)], of w as it lies in memory; f32[rows][ceil(columns / 2 / 128)], where the product is cast.
    u64 x_scales, w_scales, out_scales;
    i64 x_scale_row, x_scale_column;
    u64 unused[3];  // a TensorMap's alignment
};
static_assert(sizeof(GemmArgs) == 7 * 128, "as kernels.py packs it");

}  // namespace moecomm
