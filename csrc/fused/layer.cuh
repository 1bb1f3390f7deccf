// An expert layer around two GEMMs whose tiles fetch rows and send rows home (csrc/README.md, "In two launches" and "In one launch").
// What its kernels are told besides (moecomm/fused/two_launches.py packs it), and what they have in common.
#pragma once
#include "../device/launch.cuh"
#include "../gemm/config.cuh"
#include "../protocol/row_descriptor.h"
#include "arrivals.h"

namespace moecomm {

constexpr i32 kLeastCounted = 32;

// A row of x on its way to the experts: as it is, or cast to e4m3, its scales behind it, so that one copy brings both.
struct RowConfig {
    Type type;
    i32 hidden;
    i32 counted = kLeastCounted;  // rows that are counted together as they come

    MOECOMM_BOTH constexpr bool scaled() const { return type == Type::e4m3; }
    MOECOMM_BOTH constexpr i32 columns_bytes() const { return hidden * bytes_of(type); }  // scales, in fp32, lie behind them
    MOECOMM_BOTH constexpr i32 bytes() const { return columns_bytes() + (scaled() ? align_up(4 * ceil_div(hidden, kScaleGroup), 16) : 0); }
    // From one to the next, where it is offered and where it is fetched to.  Rows with scales have lines of memory of their own: those are
    // read by ordinary loads (RowsAreFetched), and 128 columns, which are loaded at once, are a line.
    MOECOMM_BOTH constexpr i32 pitch() const { return scaled() ? align_up(bytes(), 128) : bytes(); }
};

struct LayerArgs {
    Context ctx;
    // Of our own tokens.
    u64 x;               // [num_tokens][hidden], rows x_stride bytes apart, 16-byte aligned
    u64 published;       // the same rows as they travel (RowConfig), for peers: an offset in our window
    u64 receive_buffer;  // [num_tokens][topk] rows, by peers: an offset in our window
    u64 owners;          // i32[num_tokens][topk]: rank of the k-th expert, -1: none
    u64 weights;         // f32[num_tokens][topk]; 0: every weight is 1
    u64 bias;            // rows bias_stride bytes apart (0: one for all); 0: none
    u64 out;             // [num_tokens][hidden], rows out_stride bytes apart
    i64 x_stride, bias_stride, out_stride;
    // Of the rows that our experts get.
    u64 descriptors;   // RowDescriptor[rows]
    u64 num_rows;      // i32
    u64 rows;          // [max_rows]: the rows themselves (RowConfig), once they are fetched
    u64 source_ranks;  // u64[max_rows]: the address that each row that the experts make goes to
    u64 fetched;       // u32[]: of every RowConfig::counted rows, how many are there; words for every kLeastCounted
    u64 made;          // u32[]: of every row tile, how often a block has made columns of it in the first GEMM (one_launch.cuh)
    u64 taken;         // u32: positions of tiles that somebody has (one_launch.cuh)
    u64 fetching;      // u32: rows that somebody fetches, or has
    u64 late;          // u32: 1 where rows did not come in time, or the dispatch has failed
    i32 num_tokens, max_rows;
    i32 row_tiles;  // that there are words for
};
static_assert(sizeof(LayerArgs) % sizeof(u64) == 0 && sizeof(LayerArgs) < 2048, "a kernel takes 4 KB of arguments, GemmArgs among them");

// The tag of the round whose rows are dealt with, 0 if it was void.
MOECOMM_FN u32 layer_round(const LayerArgs& a) { return load_relaxed(&own_state(a.ctx)->last_dispatch); }
MOECOMM_FN bool aborted(const LayerArgs& a) { return load_relaxed(deadline_of(a.ctx).abort_here) != 0; }
// By one thread of the first launch: whether the dispatch has failed is settled, once, for the launches after it.  An abort word may be set
// at any time, and blocks that wait for each other must not read different things.
MOECOMM_FN void note_failure(const LayerArgs& a) {
    if (aborted(a)) store_relaxed(reinterpret_cast<u32*>(a.late), 1);
}
// That round if nothing has failed, else 0.
MOECOMM_FN u32 round_that_goes_on(const LayerArgs& a) {
    const u32 late = load_relaxed(reinterpret_cast<const u32*>(a.late)), round = layer_round(a);  // both on their way at once
    return late == 0 ? round : 0;
}
// Rows that our experts get; none of a dispatch that has failed, whose outputs may hold anything.
MOECOMM_FN i32 layer_rows(const LayerArgs& a) {
    const i32 rows = min(*reinterpret_cast<const i32*>(a.num_rows), a.max_rows);  // on its way while the other word is
    return aborted(a) ? 0 : rows;
}

// At each home: that all rows of `owner` have landed, by the tag of the dispatch.  A word that combines use, whose tags are others: nobody
// writes a later one before this one has been read, or is of no use any more.
MOECOMM_FN u64 landed_at(const Context& ctx, i32 owner) { return reduced_at(ctx.window, ctx.shape, owner, 0); }

}  // namespace moecomm
