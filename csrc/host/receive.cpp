#include "receive.h"

#include <algorithm>
#include <cstring>

namespace moecomm::host {

void Inbox::take_arrived() {
    for (i32 step = 0; step < d_.r.ranks; ++step)
        for (const i32 source = d_.r.peer(step); arrived(source); next_[source] += stride_) take(source, next_[source]);
}

bool Inbox::behind(i32 chunk) const {
    for (i32 source = 0; source < d_.r.ranks; ++source)
        if (next_[source] <= chunk && open(source)) return true;
    return false;
}

bool Inbox::any_arrived() const {
    for (i32 source = 0; source < d_.r.ranks; ++source)
        if (arrived(source)) return true;
    return false;
}

void Inbox::look_at_last(PeerWaits& waits) const {
    for (i32 source = 0; source < d_.r.ranks; ++source)
        if (const i32 last = chunks_of(source) - 1; last >= 0 && last % stride_ == worker_)
            waits.look(source, has_tag(flag(source, last), d_.r.tag));
}

i32 Inbox::first_missing() const {
    for (i32 source = 0; source < d_.r.ranks; ++source)
        if (open(source)) return source;
    return -1;
}

// Process an arrived chunk: one row of each token, and the list of its other rows on this rank.  The acquire orders the reads of both.
void Inbox::take(i32 source, i32 chunk) const {
    const u64 signal = load_acquire(flag(source, chunk));
    if (!d_.repeat) memory<u32>(d_.a.route.ranges)[static_cast<i64>(source) * d_.a.ctx.shape.max_tokens + chunk] = signal_word(signal);
    for (i32 slot = signal_first(signal); slot < signal_first(signal) + signal_count(signal); ++slot) {
        if (!d_.flat) copy_to_experts(slot);
        if (d_.scale_columns) store_scales(slot);
    }
}

// Replicate the arrived row to the token's other experts on this rank.
void Inbox::copy_to_experts(i32 slot) const {
    const DispatchArgs& a = d_.a;
    u8* x = at<u8>(a.ctx, d_.r.me, a.out_x);
    u8* scales = at<u8>(a.ctx, d_.r.me, a.out_scales);
    const i32* rows = memory<const i32>(a.route.rows) + static_cast<i64>(slot) * d_.topk;
    i64 from = -1;
    for (i32 k = 0; k < d_.topk; ++k) {
        if (rows[k] < 0) continue;
        if (from < 0) {
            from = rows[k];
            continue;
        }
        const i64 to = rows[k];
        copy_row(x + to * a.row_bytes, x + from * a.row_bytes, a.row_bytes, d_.past_cache);
        if (!d_.scale_columns) std::memcpy(scales + to * a.scale_bytes, scales + from * a.scale_bytes, a.scale_bytes);
    }
}

// Copy the scales from the receive buffer to the columns of every row of the token.
void Inbox::store_scales(i32 slot) const {
    const DispatchArgs& a = d_.a;
    const u8* scales = at<const u8>(a.ctx, d_.r.me, a.out_scales) + static_cast<i64>(slot) * a.scale_bytes;
    if (d_.flat) return store_scale_column(scales, slot);
    const i32* rows = memory<const i32>(a.route.rows) + static_cast<i64>(slot) * d_.topk;
    for (i32 k = 0; k < d_.topk; ++k)
        if (rows[k] >= 0) store_scale_column(scales, rows[k]);
}

void Inbox::store_scale_column(const u8* scales, i64 row) const {
    const DispatchArgs& a = d_.a;
    const i64 words = a.scale_bytes / sizeof(u32);
    const i64 rows_of_expert = batched_group(a.max_rows, d_.plan.experts_here());
    const bool batched = a.layout == static_cast<i32>(Layout::batched);
    const i64 group = batched ? row / rows_of_expert : 0, place = batched ? row % rows_of_expert : row;
    u32* out = memory<u32>(a.scale_columns) + group * words * a.scale_stride + place;
    for (i64 w = 0; w < words; ++w) std::memcpy(out + w * a.scale_stride, scales + w * sizeof(u32), sizeof(u32));
}

void clear_unused(const Dispatch& d) {
    const DispatchArgs& a = d.a;
    const i64 rows = *memory<const i32>(a.num_rows);
    if (!d.flat || a.clear_rows <= rows) return;
    const i64 first = rows * d.topk, entries = a.clear_rows * static_cast<i64>(d.topk) - first;
    std::memset(at<u8>(a.ctx, d.r.me, a.out_topk_idx) + first * a.idx_bytes, 0xff, entries * a.idx_bytes);
    std::fill_n(at<float>(a.ctx, d.r.me, a.out_weights) + first, entries, 0.0f);
}

void clear_padding(const Dispatch& d) {
    if (d.a.layout != static_cast<i32>(Layout::expert)) return;
    i32* src = d.a.out_src != 0 ? at<i32>(d.a.ctx, d.r.me, d.a.out_src) : nullptr;
    float* weights = d.a.out_weights != 0 ? at<float>(d.a.ctx, d.r.me, d.a.out_weights) : nullptr;
    i64 start = 0;
    for (i32 e = 0; e < d.plan.experts_here(); ++e) {
        const Plan::Padding padding = d.plan.padding(e, start);
        for (i64 row = padding.filled; row < padding.end; ++row) {
            if (src != nullptr) src[2 * row] = src[2 * row + 1] = -1;
            if (weights != nullptr) weights[row] = 0.0f;
        }
        start = padding.end;
    }
}

}  // namespace moecomm::host
