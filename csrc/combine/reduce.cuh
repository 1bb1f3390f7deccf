// Step 2, expert and batched: the rows of each token here become one, in fp32 and in the order of k, staged for the token's home.
#pragma once
#include "gather.cuh"

namespace moecomm {

// The role of a reduce warp: one row of each block, or an item without a row, so that every warp comes to every turn in order.
template <class Call>
struct Reduce {
    static constexpr CombineConfig cfg = Call::cfg;
    static_assert(cfg.reduce_warps == kMinChunk || cfg.layout == Layout::flat, "a warp for each row of a block");
    static constexpr Type kType = cfg.type;
    static constexpr i32 kRowBytes = cfg.row_bytes();
    static constexpr bool kWeighted = cfg.weighted;

    const Call& c;
    const i32 turns;
    i32 turn = 0;
    i32 slot;   // our flat row of the turn, -1: none
    i32 entry;  // this lane's row of it, -1: none

    MOECOMM_FN explicit Reduce(const Call& call) : c(call), turns(staged_turns(call)) { look_ahead(); }

    // What the next row is made of, loaded one row early.
    MOECOMM_FN void look_ahead() {
        slot = entry = -1;
        if (turn >= turns) return;
        const StagedBlock block = staged_block(c, turn);
        if (block.first + warp_id() >= block.end) return;
        slot = block.first + warp_id();
        if (lane_id() < cfg.topk) entry = reinterpret_cast<const i32*>(c.a.route.rows)[static_cast<i64>(slot) * cfg.topk + lane_id()];
    }

    MOECOMM_FN bool open(Source& source, Item& out) {
        if (turn >= turns) return false;
        const i32 row = entry;
        out = {0, slot, turn};
        if (slot >= 0 && c.a.weight_grads != 0 && lane_id() < cfg.topk) {
            const float grad = row >= 0 ? reinterpret_cast<const float*>(c.a.weight_grads)[row] : 0.0f;
            reinterpret_cast<float*>(c.staged_row(slot) + c.grads_at())[lane_id()] = grad;
        }
        ++turn;
        look_ahead();
        if (row < 0) return true;
        source.row = reinterpret_cast<const u8*>(c.a.y) + row * c.a.y_stride;
        if constexpr (kWeighted) source.weight = reinterpret_cast<const float*>(c.a.route.row_weights)[row];
        return true;
    }

    template <i32 n>
    MOECOMM_FN void store(const Item& out, i32 column, const float (&sum)[n]) const {
        if (out.index >= 0) store_columns<cfg.wire>(c.staged_row(out.index) + column * bytes_of(cfg.wire), sum);
    }

    MOECOMM_FN void close(const Item& out) const { tell_staged(c, out.turn); }
};

template <class Call>
MOECOMM_FN void reduce(const Call& c) {
    Reduce<Call> role(c);
    Gather<RowRing<Call::cfg.reduce_slots, Call::cfg.reduce_bytes>, Reduce<Call>>{c.shared.reduce[warp_id()], role}.run();
}

}  // namespace moecomm
