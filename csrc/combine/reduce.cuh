// Step 2, expert and batched: the rows of each token here become one, in fp32 and in the order of k, staged for the token's home.
#pragma once
#include "gather.cuh"

namespace moecomm {

// The role of a reduce warp.  Rows of a block of kMinChunk flat rows one after the other, then the flag of the block.
template <class Call>
struct Reduce {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr Type kType = cfg.type;
    static constexpr i32 kRowBytes = cfg.row_bytes();
    static constexpr bool kWeighted = cfg.weighted;

    const Call& c;
    const i32 items;
    i32 item;                      // of StagedBlock
    StagedBlock block{0, 0, 0, 0};  // first: the next row
    i32 ahead = -1;                // this lane's entry of that row

    MOECOMM_FN Reduce(const Call& call, i32 warp) : c(call), items(call.staged_items()), item(blockIdx.x + gridDim.x * warp) {}

    MOECOMM_FN i32 entry_of(i32 slot) const {
        if (lane_id() >= cfg.topk) return -1;
        return reinterpret_cast<const i32*>(c.a.route.rows)[static_cast<i64>(slot) * cfg.topk + lane_id()];
    }

    MOECOMM_FN bool open(Source& source, Item& out) {
        while (block.first >= block.end) {
            if (item >= items) return false;
            block = staged_block(c, item);
            item += gridDim.x * cfg.reduce_warps;
            if (block.first < block.end) ahead = entry_of(block.first);
        }
        const i32 row = ahead, slot = block.first++;
        const bool ends = block.first == block.end;
        if (!ends) ahead = entry_of(block.first);
        out = {0, slot, ends ? block.rank : -1, block.block};
        if (row >= 0) {
            source.row = reinterpret_cast<const u8*>(c.a.y) + row * c.a.y_stride;
            if constexpr (kWeighted) source.weight = reinterpret_cast<const float*>(c.a.route.row_weights)[row];
        }
        if (c.a.weight_grads != 0 && lane_id() < cfg.topk) {
            const float grad = row >= 0 ? reinterpret_cast<const float*>(c.a.weight_grads)[row] : 0.0f;
            reinterpret_cast<float*>(c.staged_row(slot) + c.grads_at())[lane_id()] = grad;
        }
        return true;
    }

    template <i32 n>
    MOECOMM_FN void store(const Item& out, i32 column, const float (&sum)[n]) const {
        store_columns<cfg.wire>(c.staged_row(out.index) + column * bytes_of(cfg.wire), sum);
    }

    MOECOMM_FN void close(const Item& out) const {
        if (out.rank >= 0) tell_reduced(c, out.rank, out.block);
    }
};

template <class Call>
MOECOMM_FN void reduce(const Call& c) {
    const i32 warp = warp_id();
    Reduce<Call> role(c, warp);
    Gather<RowRing<Call::cfg.reduce_slots, Call::cfg.reduce_bytes>, Reduce<Call>>{c.shared.reduce[warp], role}.run();
}

}  // namespace moecomm
