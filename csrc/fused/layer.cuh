// Helpers shared by the kernels of an expert layer (docs/maintainers/fused_kernels.md, "Fused layer").
#pragma once
#include "../device/launch.cuh"
#include "../gemm/config.cuh"
#include "../protocol/row_descriptor.h"
#include "arrivals.h"
#include "layer_args.h"

namespace moecomm {

// Form in which a row of x travels to the experts: unchanged, or cast to e4m3 with its scales behind it, so that one copy moves both.
struct RowConfig {
    Type type;
    i32 hidden;
    i32 counted = kLeastCounted;  // fetched rows that share a counter
    bool whole = false;           // of rows with scales: one for the row, and not one for kScaleGroup columns
    bool integers = false;        // with `whole`: int8 and not e4m3

    MOECOMM_BOTH constexpr bool scaled() const { return type == Type::e4m3; }
    MOECOMM_BOTH constexpr i32 scales() const { return whole ? 1 : ceil_div(hidden, kScaleGroup); }  // of a row that is scaled
    MOECOMM_BOTH constexpr i32 columns_bytes() const { return hidden * bytes_of(type); }             // offset of the scales, in fp32
    MOECOMM_BOTH constexpr i32 bytes() const { return columns_bytes() + (scaled() ? align_up(4 * scales(), 16) : 0); }
    // Stride of rows, both published and fetched.  Rows with scales are aligned to cache lines of 128 bytes: scales are read through L1
    // (load_scales_of_tiles), so no two rows may share a line; and the 128 columns that a tensor load reads at once are then one line.
    MOECOMM_BOTH constexpr i32 pitch() const { return scaled() ? align_up(bytes(), 128) : bytes(); }
};

// Returns the tag of the layer's dispatch round, 0 if that round was invalid.  Relaxed.
MOECOMM_FN u32 layer_round(const LayerArgs& a) { return load_relaxed(&own_state(a.ctx)->last_dispatch); }
MOECOMM_FN bool aborted(const LayerArgs& a) { return load_relaxed(deadline_of(a.ctx).abort_here) != 0; }
// Sets `failed` if the dispatch failed.  One thread of expert_layer.cuh calls it, so that the question is decided once for everything that
// follows: an abort word may be set at any time, and blocks that wait for each other must not read different values.
MOECOMM_FN void note_failure(const LayerArgs& a) {
    if (aborted(a)) store_relaxed(reinterpret_cast<u32*>(a.failed), 1);
}
// Returns layer_round() if nothing has failed, else 0.  The caller has acquired what may have set `failed`.
MOECOMM_FN u32 valid_round(const LayerArgs& a) {
    const u32 failed = load_relaxed(reinterpret_cast<const u32*>(a.failed)), round = layer_round(a);  // concurrent loads
    return failed == 0 ? round : 0;
}
// Returns the number of rows of this rank's experts; 0 after a failed dispatch, whose outputs may hold anything.
MOECOMM_FN i32 layer_rows(const LayerArgs& a) {
    const i32 rows = min(*reinterpret_cast<const i32*>(a.num_rows), a.max_rows);  // loaded concurrently with the abort word
    return aborted(a) ? 0 : rows;
}

// Offset, in the window of a source rank, of the signal that all rows of `owner` are in the receive buffer; its tag is that of the
// dispatch. Combines use the same word with other tags.  No rank writes a later tag before this one has been read or is no longer needed.
MOECOMM_FN u64 received_at(const Context& ctx, i32 owner) { return reduced_at(ctx.window, ctx.shape, owner, 0); }

}  // namespace moecomm
