// Step 2, flat: the caller has already made one row out of its experts' rows.  It is staged as it is, with bulk copies.
#pragma once
#include "call.cuh"

namespace moecomm {

template <class Call>
MOECOMM_FN void stage_grads(const Call& c, i32 slot) {
    if (c.a.weight_grads == 0 || lane_id() >= Call::cfg.topk) return;
    const i64 entry = static_cast<i64>(slot) * Call::cfg.topk + lane_id();
    reinterpret_cast<float*>(c.staged_row(slot) + c.grads_at())[lane_id()] = reinterpret_cast<const float*>(c.a.weight_grads)[entry];
}

// By one lane: a row through the ring of its warp, loads running ahead of stores.  `moved` pieces have gone through it before.
template <class Call, class Ring>
MOECOMM_FN void stage_row(const Call& c, i32 slot, Ring& ring, i32& moved) {
    constexpr i32 row_bytes = Call::cfg.row_bytes(), pieces = ceil_div(row_bytes, Ring::kBytes), ahead = Ring::kSlots / 2;
    const u8* from = reinterpret_cast<const u8*>(c.a.y) + slot * c.a.y_stride;
    u8* to = c.staged_row(slot);
    const auto bytes = [](i32 piece) { return min(Ring::kBytes, row_bytes - piece * Ring::kBytes); };
    for (i32 i = 0; i < pieces + ahead; ++i) {
        if (i < pieces) {
            bulk_wait_read<Ring::kSlots - ahead - 1>();
            const i32 place = (moved + i) % Ring::kSlots;
            bulk_load(ring.data[place], from + i * Ring::kBytes, bytes(i), &ring.full[place]);
        }
        const i32 out = i - ahead;
        if (out < 0) continue;
        const i32 place = (moved + out) % Ring::kSlots;
        copy_wait(&ring.full[place], (moved + out) / Ring::kSlots & 1);
        bulk_store(to + out * Ring::kBytes, ring.data[place], bytes(out));
        bulk_commit();
    }
    moved += pieces;
    bulk_wait<0>();
}

// By each reduce warp.
template <class Call>
MOECOMM_FN void stage(const Call& c) {
    const i32 turns = staged_turns(c);
    i32 moved = 0;
    for (i32 turn = 0; turn < turns; ++turn) {
        const StagedBlock block = staged_block(c, turn);
        for (i32 slot = block.first + warp_id(); slot < block.end; slot += Call::cfg.reduce_warps) {
            stage_grads(c, slot);
            if (lane_id() == 0) stage_row(c, slot, c.shared.reduce[warp_id()], moved);
        }
        tell_staged(c, turn);
    }
}

}  // namespace moecomm
