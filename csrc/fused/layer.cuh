// What the kernels of an expert layer have in common (csrc/README.md, "The fused layer").
#pragma once
#include "../device/launch.cuh"
#include "../gemm/config.cuh"
#include "../protocol/row_descriptor.h"
#include "arrivals.h"
#include "layer_args.h"

namespace moecomm {

// A row of x on its way to the experts: as it is, or cast to e4m3, its scales behind it, so that one copy brings both.
struct RowConfig {
    Type type;
    i32 hidden;
    i32 counted = kLeastCounted;  // rows that are counted together as they come

    MOECOMM_BOTH constexpr bool scaled() const { return type == Type::e4m3; }
    MOECOMM_BOTH constexpr i32 columns_bytes() const { return hidden * bytes_of(type); }  // scales, in fp32, lie behind them
    MOECOMM_BOTH constexpr i32 bytes() const { return columns_bytes() + (scaled() ? align_up(4 * ceil_div(hidden, kScaleGroup), 16) : 0); }
    // From one to the next, where it is published and where it is fetched to.  Rows with scales have lines of memory of their own: those
    // are read by ordinary loads (expert_layer.cuh), and 128 columns, which are loaded at once, are a line.
    MOECOMM_BOTH constexpr i32 pitch() const { return scaled() ? align_up(bytes(), 128) : bytes(); }
};

// The tag of the round whose rows are dealt with, 0 if it was void.
MOECOMM_FN u32 layer_round(const LayerArgs& a) { return load_relaxed(&own_state(a.ctx)->last_dispatch); }
MOECOMM_FN bool aborted(const LayerArgs& a) { return load_relaxed(deadline_of(a.ctx).abort_here) != 0; }
// By one thread of expert_layer.cuh: whether the dispatch has failed is settled, once, for the launches after it.  An abort word may be set
// at any time, and blocks that wait for each other must not read different things.
MOECOMM_FN void note_failure(const LayerArgs& a) {
    if (aborted(a)) store_relaxed(reinterpret_cast<u32*>(a.failed), 1);
}
// That round if nothing has failed, else 0.
MOECOMM_FN u32 round_that_goes_on(const LayerArgs& a) {
    const u32 failed = load_relaxed(reinterpret_cast<const u32*>(a.failed)), round = layer_round(a);  // both on their way at once
    return failed == 0 ? round : 0;
}
// Rows that our experts get; none of a dispatch that has failed, whose outputs may hold anything.
MOECOMM_FN i32 layer_rows(const LayerArgs& a) {
    const i32 rows = min(*reinterpret_cast<const i32*>(a.num_rows), a.max_rows);  // on its way while the other word is
    return aborted(a) ? 0 : rows;
}

// At each source rank: that all rows of `owner` have been received, by the tag of the dispatch.  A word that combines use, whose tags are
// others: nobody writes a later one before this one has been read, or is of no use any more.
MOECOMM_FN u64 received_at(const Context& ctx, i32 owner) { return reduced_at(ctx.window, ctx.shape, owner, 0); }

}  // namespace moecomm
