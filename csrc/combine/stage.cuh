// Step 2, flat: the caller has already made one row out of its experts' rows.  It is staged as it is, with bulk copies.
#pragma once
#include "call.cuh"

namespace moecomm {

template <class Call>
MOECOMM_FN void stage_grads(const Call& c, const StagedBlock& block) {
    if (c.a.weight_grads == 0 || lane_id() >= Call::cfg.topk) return;
    for (i32 slot = block.first; slot < block.end; ++slot) {
        const i64 entry = static_cast<i64>(slot) * Call::cfg.topk + lane_id();
        reinterpret_cast<float*>(c.staged_row(slot) + c.grads_at())[lane_id()] = reinterpret_cast<const float*>(c.a.weight_grads)[entry];
    }
}

// By one lane: all rows of a block through its ring, loads running ahead of stores.  `moved` pieces have gone through it before.
template <class Call, class Ring>
MOECOMM_FN i32 stage_rows(const Call& c, const StagedBlock& block, Ring& ring, i32 moved) {
    constexpr i32 row_bytes = Call::cfg.row_bytes(), per_row = ceil_div(row_bytes, Ring::kBytes), ahead = Ring::kSlots / 2;
    const i32 pieces = (block.end - block.first) * per_row;
    for (i32 i = 0; i < pieces + ahead; ++i) {
        if (i < pieces) {
            bulk_wait_read<Ring::kSlots - ahead - 1>();
            const i32 at = i % per_row * Ring::kBytes, slot = (moved + i) % Ring::kSlots;
            const u8* row = reinterpret_cast<const u8*>(c.a.y) + (block.first + i / per_row) * c.a.y_stride;
            bulk_load(ring.data[slot], row + at, min(Ring::kBytes, row_bytes - at), &ring.full[slot]);
        }
        const i32 out = i - ahead;
        if (out < 0) continue;
        const i32 at = out % per_row * Ring::kBytes, slot = (moved + out) % Ring::kSlots;
        copy_wait(&ring.full[slot], (moved + out) / Ring::kSlots & 1);
        bulk_store(c.staged_row(block.first + out / per_row) + at, ring.data[slot], min(Ring::kBytes, row_bytes - at));
        bulk_commit();
    }
    bulk_wait<0>();
    return moved + pieces;
}

// By each reduce warp.
template <class Call>
MOECOMM_FN void stage(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    const i32 warp = warp_id(), items = c.staged_items();
    i32 moved = 0;
    for (i32 item = blockIdx.x + gridDim.x * warp; item < items; item += gridDim.x * cfg.reduce_warps) {
        const StagedBlock block = staged_block(c, item);
        if (block.first >= block.end) continue;
        stage_grads(c, block);
        if (lane_id() == 0) moved = stage_rows(c, block, c.shared.reduce[warp], moved);
        tell_reduced(c, block.rank, block.block);
    }
}

}  // namespace moecomm
