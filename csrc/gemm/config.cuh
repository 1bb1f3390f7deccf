// What a grouped GEMM is compiled for: moecomm/fused/kernels.py writes it.
#pragma once
#include "../device/config.cuh"
#include "args.h"
#include "tensor.cuh"

namespace moecomm {

constexpr i32 kWoven = 8;         // gate rows before their up rows
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

    MOECOMM_BOTH constexpr bool scaled() const { return type == Type::e4m3; }
    // Times kPartColumns that a warpgroup multiplies with, one after the other.  Of e4m3 two: the 128 columns of a product that share a
    // scale are then those of one block, also after SwiGLU.
    MOECOMM_BOTH constexpr i32 parts() const { return scaled() ? 2 : 1; }
    MOECOMM_BOTH constexpr i32 block_columns() const { return gemm_block_columns(scaled()); }    // rows of w
    MOECOMM_BOTH constexpr i32 depth() const { return kSlotRowBytes / bytes_of(type); }          // columns of x and w, in a slot
    MOECOMM_BOTH constexpr i32 weight_bytes() const { return block_columns() * kSlotRowBytes; }  // of w, in a slot
    MOECOMM_BOTH constexpr i32 row_bytes() const { return most_rows * kSlotRowBytes; }           // of x, in a slot
    // Of product that a warpgroup turns at once; two places, so that each is met for once.
    MOECOMM_BOTH constexpr i32 stage_bytes() const { return gemm_stage_bytes(scaled()); }
    MOECOMM_BOTH constexpr i32 shared_bytes() const { return gemm_shared_bytes(scaled(), most_rows, stages); }
    MOECOMM_BOTH constexpr i32 least_box() const { return row_unit / cluster; }  // rows that the first of the maps loads
};

}  // namespace moecomm
