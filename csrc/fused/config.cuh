// What a grouped GEMM is compiled for, and what it is told when it is launched.  moecomm/fused/kernels.py writes the one and packs the
// other.
#pragma once
#include "../device/config.cuh"
#include "tensor.cuh"
#include "tiles.h"

namespace moecomm {

constexpr i32 kDepth = 64;  // columns of x and w that a slot of the ring holds: 128 bytes, the widest swizzle
constexpr i32 kSlotRowBytes = 128;
constexpr i32 kBlockColumns = 128;  // rows of w that a block multiplies with, 64 a warpgroup
constexpr i32 kWoven = 8;           // gate rows before their up rows
constexpr i32 kMostGroups = 512;    // their counts lie in shared memory
constexpr i32 kRowMaps = 5;         // heights of boxes of x

struct GemmConfig {
    Type type;      // of x, w and out
    bool swiglu;    // out = silu(gate) * up, of rows of w that lie interleaved by kWoven in the ring ...
    bool apart;     // ... and, in memory, all gate rows before all up rows
    i32 row_unit;   // of the rows of a tile: 16 or a multiple of it
    i32 most_rows;  // of a tile, a multiple of row_unit
    i32 stages;     // slots of the ring
    i32 cluster;    // blocks that multiply the same rows with neighbouring columns: each loads its part of the rows for all
    i32 shared_bytes;
    bool helped;  // some blocks, GemmArgs::helpers, begin with something else

    MOECOMM_BOTH constexpr i32 row_bytes() const { return most_rows * kSlotRowBytes; }  // of x, in a slot
    MOECOMM_BOTH constexpr i32 least_box() const { return row_unit / cluster; }         // rows that the first of the maps loads
};

struct GemmArgs {
    TensorMap w;            // [groups][columns][depth], boxes of kBlockColumns rows; apart: [groups][columns / 16][gate, up][8][depth],
                            // as many rows, which the strides of the map put where the interleaved ones would be
    TensorMap x[kRowMaps];  // [rows][depth], boxes of least_box() rows, twice as many, and so on
    u64 out;                // [rows][columns], or half the columns with swiglu
    u64 counts;             // i32[groups]: rows of each group
    i32 columns, depth;
    Grouping grouping;
    // Blocks that begin with something else, whole clusters, and of the tiles those that are not theirs, in 1024ths.
    i32 helpers, early;
};
static_assert(sizeof(GemmArgs) == 6 * 128 + 64, "as kernels.py packs it");

}  // namespace moecomm
