#include "send.h"

#include <algorithm>
#include <cstring>

namespace moecomm::host {

namespace {

// A row as it travels.
struct Payload {
    const u8* row;
    const u8* scales;
};

Payload pack(const DispatchArgs& a, i32 token, std::vector<u8>& packed) {
    const u8* row = memory<const u8>(a.x) + token * a.x_stride;
    if (a.quantize == 0) return {row, memory<const u8>(a.in_scales) + token * a.in_scales_stride};
    const i64 scales_at = align_up<i64>(a.row_bytes, sizeof(float));
    packed.resize(scales_at + a.scale_bytes);  // zeros, which is what stays behind the last scale
    u8* scales = packed.data() + scales_at;
    quantize_row(packed.data(), scales, static_cast<ScaleFormat>(a.scale_format), row, static_cast<Type>(a.in_type), a.hidden);
    return {packed.data(), scales};
}

// Scales lie beside the row, or where they wait to become columns: by flat row.
void copy_payload(const Dispatch& d, i32 rank, i64 row, i32 slot, const Payload& from) {
    const Notice& to = d.r.notice(rank);
    copy_row(at<u8>(d.a.ctx, rank, to.x) + row * d.a.row_bytes, from.row, d.a.row_bytes, d.past_cache);
    if (d.a.scale_bytes == 0) return;
    const i64 scale_row = d.scale_columns ? slot : row;
    std::memcpy(at<u8>(d.a.ctx, rank, to.scales) + scale_row * d.a.scale_bytes, from.scales, d.a.scale_bytes);
}

// Takes the next row of each expert of the token, in the order of k, and the next flat row of each rank that owns one of them.
void place_token(const Dispatch& d, i32 token, i32* cursors) {
    i32* slot = d.token_slot + static_cast<i64>(token) * d.r.ranks;
    std::fill_n(slot, d.r.ranks, -1);
    for (i64 entry = static_cast<i64>(token) * d.topk; entry < (token + 1ll) * d.topk; ++entry) {
        const i64 id = d.plan.id_at(entry);
        const i32 owner = id < 0 ? -1 : d.plan.owner(id);
        d.token_owner[entry] = owner;
        d.token_rows[entry] = -1;
        if (owner < 0) continue;
        if (slot[owner] < 0) slot[owner] = cursors[d.a.ctx.shape.experts + owner]++;
        d.token_rows[entry] = d.flat ? slot[owner] : cursors[id]++;
    }
}

// Beside the row at `rank`: whose it is, which experts, which weights.
void send_metadata(const Dispatch& d, i32 token, i32 rank, i32 slot) {
    const DispatchArgs& a = d.a;
    const Notice& to = d.r.notice(rank);
    const i64 first = static_cast<i64>(token) * d.topk;
    const i64 there = static_cast<i64>(slot) * d.topk;
    const float* weight = memory<const float>(a.topk_weights);
    i32* src = to.src != 0 ? at<i32>(a.ctx, rank, to.src) : nullptr;
    float* weights = to.weights != 0 ? at<float>(a.ctx, rank, to.weights) : nullptr;
    for (i32 k = 0; k < d.topk; ++k) {
        const bool here = d.token_owner[first + k] == rank;
        const i32 row = d.token_rows[first + k];
        const float w = weight != nullptr ? weight[first + k] : 1.0f;
        if (!d.flat) {
            at<i32>(a.ctx, rank, to.rows)[there + k] = here ? row : -1;
            if (!here) continue;
            if (weights != nullptr) weights[row] = w;
        } else {
            if (weights != nullptr) weights[there + k] = here ? w : 0.0f;
            const i64 local = here ? d.plan.local(d.plan.id_at(first + k)) : -1;
            if (to.topk_idx != 0 && a.idx_bytes == 8) at<i64>(a.ctx, rank, to.topk_idx)[there + k] = local;
            if (to.topk_idx != 0 && a.idx_bytes == 4) at<i32>(a.ctx, rank, to.topk_idx)[there + k] = static_cast<i32>(local);
            if (!here) continue;
        }
        if (src == nullptr) continue;
        src[2ll * row] = d.r.me;
        src[2ll * row + 1] = token;
    }
}

// The row at `rank` that the payload is sent to: that of the first expert there.
i32 payload_row(const Dispatch& d, i32 token, i32 rank, i32 slot) {
    if (d.flat) return slot;
    const i64 first = static_cast<i64>(token) * d.topk;
    i32 k = 0;
    while (d.token_owner[first + k] != rank) ++k;
    return d.token_rows[first + k];
}

}  // namespace

void send_chunk(Dispatch& d, i32 chunk, std::vector<u8>& packed) {
    const i32 first_token = chunk * d.a.chunk_tokens;
    const i32 end = std::min(first_token + d.a.chunk_tokens, d.a.num_tokens);
    i32* cursors = d.repeat ? nullptr : d.plan.cursors(chunk);
    i32 first[kMaxRanks] = {}, count[kMaxRanks] = {};
    for (i32 token = first_token; token < end; ++token) {
        if (!d.repeat) place_token(d, token, cursors);
        Payload payload{};
        for (i32 turn = 0; turn < d.r.ranks; ++turn) {
            const i32 rank = d.r.peer(turn);
            const i32 slot = d.token_slot[static_cast<i64>(token) * d.r.ranks + rank];
            if (slot < 0) continue;
            if (payload.row == nullptr) payload = pack(d.a, token, packed);
            copy_payload(d, rank, payload_row(d, token, rank, slot), slot, payload);
            if (!d.repeat) send_metadata(d, token, rank, slot);
            if (count[rank]++ == 0) first[rank] = slot;
        }
    }
    order_copied_rows();
    for (i32 turn = 0; turn < d.r.ranks; ++turn) {
        const i32 rank = d.r.peer(turn);
        u64* arrived = at<u64>(d.a.ctx, rank, arrived_at(d.a.ctx.window, d.a.ctx.shape, d.r.me, chunk));
        store_release(arrived, chunk_signal(d.r.tag, first[rank], count[rank]));
    }
}

}  // namespace moecomm::host
