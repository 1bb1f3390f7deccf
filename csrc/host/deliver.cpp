#include "deliver.h"

#include <cstring>

namespace moecomm::host {

namespace {

// The row at `rank` that receives the payload: that of the token's first expert there.  The owner replicates it.
i32 payload_row(const Token& token, i32 rank) {
    const Entry* entry = token.entries;
    while (entry->owner != rank) ++entry;
    return entry->row;
}

}  // namespace

void Delivery::deliver(const Token& token, const Payload& payload) {
    for (i32 step = first_step_; step < d_.r.scaleup_ranks; ++step) {
        const i32 rank = d_.r.neighbor(step), here = rank - d_.r.first;
        const i32 slot = token.slots[here];
        if (slot < 0) continue;
        store_payload(token, rank, slot, payload);
        if (!d_.repeat) store_metadata(token, rank, slot);
        if (count_[here]++ == 0) first_[here] = slot;
    }
}

void Delivery::raise_flags() const {
    order_copied_rows();
    for (i32 step = first_step_; step < d_.r.scaleup_ranks; ++step) {
        const i32 rank = d_.r.neighbor(step), here = rank - d_.r.first;
        u64* arrived = at<u64>(d_.a.ctx, rank, arrived_at(d_.a.ctx.window, d_.a.ctx.shape, source_, chunk_));
        store_release(arrived, chunk_signal(d_.r.tag, first_[here], count_[here]));
    }
}

// Scales are stored by output row, or by flat row where the owner transposes them into columns later.
void Delivery::store_payload(const Token& token, i32 rank, i32 slot, const Payload& payload) const {
    const RoundHeader& to = d_.r.header(rank);
    const i64 row = d_.flat ? slot : payload_row(token, rank);
    copy_row(at<u8>(d_.a.ctx, rank, to.dispatch.x) + row * d_.a.row_bytes, payload.row, d_.a.row_bytes, d_.past_cache);
    if (d_.a.scale_bytes == 0) return;
    const i64 scale_row = d_.scale_columns ? slot : row;
    std::memcpy(at<u8>(d_.a.ctx, rank, to.dispatch.scales) + scale_row * d_.a.scale_bytes, payload.scales, d_.a.scale_bytes);
}

// Store the metadata at `rank`: source rank and token number, experts, weights.
void Delivery::store_metadata(const Token& token, i32 rank, i32 slot) const {
    const DispatchArgs& a = d_.a;
    const RoundHeader& to = d_.r.header(rank);
    const i64 there = static_cast<i64>(slot) * d_.topk;
    i32* src = to.dispatch.src != 0 ? at<i32>(a.ctx, rank, to.dispatch.src) : nullptr;
    float* weights = to.dispatch.weights != 0 ? at<float>(a.ctx, rank, to.dispatch.weights) : nullptr;
    for (i32 k = 0; k < d_.topk; ++k) {
        const Entry& entry = token.entries[k];
        const bool here = entry.owner == rank;
        if (!d_.flat) {
            at<i32>(a.ctx, rank, to.dispatch.rows)[there + k] = here ? entry.row : -1;
            if (!here) continue;
            if (weights != nullptr) weights[entry.row] = entry.weight;
        } else {
            if (weights != nullptr) weights[there + k] = here ? entry.weight : 0.0f;
            const i32 local = here ? entry.local : -1;
            if (to.dispatch.topk_idx != 0 && a.idx_bytes == 8) at<i64>(a.ctx, rank, to.dispatch.topk_idx)[there + k] = local;
            if (to.dispatch.topk_idx != 0 && a.idx_bytes == 4) at<i32>(a.ctx, rank, to.dispatch.topk_idx)[there + k] = local;
            if (!here) continue;
        }
        if (src == nullptr) continue;
        src[2ll * entry.row] = token.source;
        src[2ll * entry.row + 1] = token.number;
    }
}

}  // namespace moecomm::host
