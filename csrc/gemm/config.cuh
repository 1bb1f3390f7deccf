// Compile-time configuration of a grouped GEMM; moecomm/fused/kernels.py writes the instance.
#pragma once
#include "../device/config.cuh"
#include "args.h"
#include "tensor.cuh"

namespace moecomm {

constexpr i32 kWoven = 8;         // rows of an interleaved group: 8 gate rows, then their 8 up rows
constexpr i32 kScaleGroup = 128;  // columns of x, or rows and columns of w, that share a scale

// Activations of gated experts, named as in Python (GatedActivation.kernel in moecomm/fused/activations.py).
enum class Activation : i32 { swiglu, geglu, geglu_tanh, swigluoai, swiglu_limited, swiglustep };

struct GemmConfig {
    Type type;              // of x and w; e4m3 has scales, bf16 and fp16 with channel_scales
    Type out;               // of the product; e4m3: the bf16 product, cast, with scales
    bool gated;             // out = activation(gate, up); gate and up rows of w are interleaved by kWoven in the ring
    bool apart;             // in memory, all gate rows of w come before all up rows
    i32 row_unit;           // tile heights are multiples of it; itself a multiple of 16
    i32 most_rows;          // largest tile height
    i32 stages;             // slots of the ring
    i32 cluster;            // blocks that multiply the same rows with neighboring columns; each loads its part of the rows for all
    bool swapped;           // w is operand A of wgmma (its rows are M) and x operand B; false (e4m3 only): x is A (scaled_rows.cuh)
    i32 blocks_per_sm = 1;  // resident blocks of a multiprocessor
    Activation activation = Activation::swiglu;
    bool bias = false;            // GemmArgs::bias may be given
    bool channel_scales = false;  // sums over the whole depth are multiplied by a scale of their row of x and one of their row of w
    bool mxfp4 = false;           // w is MXFP4 in the order of checkpoints, and x bf16 and operand B (mxfp4.cuh)
    bool integers = false;        // with channel_scales: the bytes of x and w are int8 and not e4m3, and sums are exact
    bool dynamic = false;         // a grouped GEMM whose clusters take tiles from a counter (tile_counter.cuh)
    i32 packed_stages = 0;        // beside scaled e4m3: slots of the ring of packed MXFP4 weights (widen.cuh); 0: w is e4m3

    // A scale for 128 columns of x, and for 128 rows and columns of w.
    MOECOMM_BOTH constexpr bool scaled() const { return type == Type::e4m3 && !channel_scales; }
    // Additional warpgroups widen packed weights into slots of the ring, which hold e4m3.
    MOECOMM_BOTH constexpr bool widens() const { return packed_stages > 0; }
    MOECOMM_BOTH constexpr i32 widening_groups() const { return moecomm::widening_groups(most_rows, packed_stages); }
    MOECOMM_BOTH constexpr i32 threads() const { return gemm_threads(most_rows, packed_stages); }
    // Registers of a thread of the loader warpgroup, of a widening one, and of one that multiplies.
    MOECOMM_BOTH constexpr i32 loader_registers() const { return widens() && most_rows > 64 ? 48 : 40; }
    MOECOMM_BOTH constexpr i32 widening_registers() const { return most_rows > 64 ? 48 : 64; }
    MOECOMM_BOTH constexpr i32 math_registers() const {
        if (widens()) return most_rows > 64 ? 208 : 152;
        return blocks_per_sm == 2 ? 96 : 232;
    }
    // Registers of a block, and those that it is launched with: setmaxnreg moves them between warps, and waits forever for more.
    MOECOMM_BOTH constexpr i32 registers() const {
        return (loader_registers() + widening_groups() * widening_registers() + kMathGroups * math_registers()) * kWarpgroup;
    }
    MOECOMM_BOTH constexpr i32 launched_registers() const { return 65536 / (blocks_per_sm * threads()) / 8 * 8 * threads(); }
    MOECOMM_BOTH constexpr bool has_slot_scales() const { return scaled() || mxfp4; }  // a slot holds scales beside the operands
    // Accumulators are finished in registers before the epilogue (finish.cuh), which computes SwiGLU alone itself.
    MOECOMM_BOTH constexpr bool finishes() const { return bias || (gated && activation != Activation::swiglu); }
    // Accumulators are changed between a tile's products and its epilogue.  They are then set to 0 before each tile, and pinned after its
    // products: else ptxas waits for each product alone (its warning C7515).  multiply_scaled and multiply_rows do so in any case.
    MOECOMM_BOTH constexpr bool restarts() const { return !scaled() && (finishes() || channel_scales); }
    // Groups of kPartColumns rows of w that a warpgroup multiplies in sequence.  Two for scaled e4m3, so that the 128 product columns that
    // share a scale belong to one block, also after SwiGLU.
    MOECOMM_BOTH constexpr i32 parts() const { return scaled() ? 2 : 1; }
    MOECOMM_BOTH constexpr i32 block_columns() const { return gemm_block_columns(scaled()); }  // rows of w
    MOECOMM_BOTH constexpr i32 boxes() const { return mxfp4 ? kPackedBoxes : 1; }  // boxes of x in a slot, of neighboring columns
    MOECOMM_BOTH constexpr i32 depth() const { return boxes() * kSlotRowBytes / bytes_of(type); }  // columns of x and w in a slot
    MOECOMM_BOTH constexpr i32 weight_row_bytes() const { return mxfp4 ? kPackedRowBytes : kSlotRowBytes; }
    MOECOMM_BOTH constexpr i32 weight_bytes() const { return block_columns() * weight_row_bytes(); }  // bytes of w in a slot
    MOECOMM_BOTH constexpr i32 packed_bytes() const {
        return block_columns() * kPackedRowBytes;
    }  // bytes of packed w in a slot of its ring
    MOECOMM_BOTH constexpr i32 box_bytes() const { return most_rows * kSlotRowBytes; }  // bytes of a box of x in a slot
    MOECOMM_BOTH constexpr i32 row_bytes() const { return boxes() * box_bytes(); }      // bytes of x in a slot
    // Bytes of the product that a warpgroup transposes at once.  There are two such buffers, so that one barrier a step is enough.
    MOECOMM_BOTH constexpr i32 stage_bytes() const { return gemm_stage_bytes(scaled()); }
    MOECOMM_BOTH constexpr i32 shared_bytes() const {
        return gemm_shared_bytes(scaled(), most_rows, stages, mxfp4, dynamic, packed_stages);
    }
    MOECOMM_BOTH constexpr i32 least_box() const { return row_unit / cluster; }  // box height of the first map of x
};

}  // namespace moecomm
