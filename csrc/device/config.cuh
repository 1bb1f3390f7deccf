// What a kernel is compiled for.  moecomm/jit.py writes one of these structs, with named fields, in front of each kernel.
#pragma once
#include "../protocol/slots.h"

namespace moecomm {

constexpr i32 kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;

MOECOMM_BOTH constexpr i32 bytes_of(Type type) {
    switch (type) {
        case Type::fp32:
            return 4;
        case Type::e4m3:
            return 1;
        default:
            return 2;
    }
}

struct DispatchConfig {
    i32 ranks, experts, topk, hidden;
    Layout layout;
    Type type;        // of x
    i32 idx_bytes;    // of an id in topk_idx
    i32 row_bytes;    // as it travels and arrives
    i32 scale_bytes;  // of a row of scales, 0 without
    bool quantize;
    bool repeat;
    // How the block is made up.
    i32 send_warps, receive_warps;  // receive_warps 0: flat, where nothing is left to do with a row that has arrived
    i32 piece_columns;              // of a row, that a bulk copy moves
    i32 ring_slots;                 // pieces a send warp holds
    i32 scratch_warps;              // warps with counters for all columns, before the rings are in use
    i32 shared_bytes;

    MOECOMM_BOTH constexpr i32 columns() const { return experts + ranks; }
    MOECOMM_BOTH constexpr i32 experts_here() const { return experts / ranks; }
    MOECOMM_BOTH constexpr i32 warps() const { return send_warps + receive_warps; }
    MOECOMM_BOTH constexpr i32 pieces() const { return ceil_div(hidden, piece_columns); }
    MOECOMM_BOTH constexpr i32 piece_bytes() const { return piece_columns * bytes_of(type); }
    MOECOMM_BOTH constexpr i32 tokens_per_step() const { return kWarp / topk; }  // whole tokens that a warp looks at, an entry a lane
    MOECOMM_BOTH constexpr i32 peers_per_lane() const { return ceil_div(ranks, kWarp); }
    MOECOMM_BOTH constexpr i32 scale_groups() const { return ceil_div(hidden, kQuantGroup); }
};

struct CombineConfig {
    i32 ranks, experts, topk, hidden;
    Layout layout;
    Type type;  // of y, bias and out
    Type wire;  // of a reduced row
    bool weighted;
    // How the block is made up.
    i32 reduce_warps, pull_warps;
    i32 reduce_bytes, pull_bytes;  // of a row, that a bulk copy moves
    i32 reduce_slots, pull_slots;  // pieces a warp holds
    i32 shared_bytes;

    MOECOMM_BOTH constexpr i32 warps() const { return reduce_warps + pull_warps; }
    MOECOMM_BOTH constexpr Type staged() const { return layout == Layout::flat ? type : wire; }
    MOECOMM_BOTH constexpr i32 row_bytes() const { return hidden * bytes_of(type); }
    MOECOMM_BOTH constexpr i32 staged_bytes() const { return hidden * bytes_of(staged()); }
    MOECOMM_BOTH constexpr i32 grads_bytes() const { return align_up<i32>(topk * 4, 16); }
};

}  // namespace moecomm
