#include "send.h"

#include <algorithm>
#include <cstring>

namespace moecomm::host {

namespace {

Payload pack(const DispatchArgs& a, i32 token, std::vector<u8>& packed) {
    const u8* row = memory<const u8>(a.x) + token * a.x_stride;
    if (a.quantize == 0) return {row, memory<const u8>(a.in_scales) + token * a.in_scales_stride};
    const i64 scales_at = align_up<i64>(a.row_bytes, sizeof(float));
    packed.resize(scales_at + a.scale_bytes);  // zeros, also in the padding after the last scale
    u8* scales = packed.data() + scales_at;
    quantize_row(packed.data(), scales, static_cast<ScaleFormat>(a.scale_format), row, static_cast<Type>(a.in_type), a.hidden);
    return {packed.data(), scales};
}

// Assign the token the next row of each of its experts, in the order of k, and the next flat row at each rank that owns one of them.
void place_token(const Dispatch& d, i32 token, i32* cursors) {
    i32* slot = d.token_slot + static_cast<i64>(token) * d.r.ranks;
    std::fill_n(slot, d.r.ranks, -1);
    for (i64 entry = static_cast<i64>(token) * d.topk; entry < (token + 1ll) * d.topk; ++entry) {
        const i32 id = d.plan.id_at(entry);
        const i32 owner = id < 0 ? -1 : d.plan.owner(id);
        d.token_owner[entry] = owner;
        d.token_rows[entry] = -1;
        if (owner < 0) continue;
        if (slot[owner] < 0) slot[owner] = cursors[d.a.ctx.shape.slots + owner]++;
        d.token_rows[entry] = d.flat ? slot[owner] : cursors[id]++;
    }
}

// Write the entries of a placed token, from which forwarders and owners take its metadata.
void write_metadata(const Dispatch& d, i32 token, Entry* entries) {
    const float* weight = memory<const float>(d.a.topk_weights);
    for (i32 k = 0; k < d.topk; ++k) {
        const i64 entry = static_cast<i64>(token) * d.topk + k;
        const i32 owner = d.token_owner[entry];
        entries[k] = {owner, d.token_rows[entry], -1, weight != nullptr ? weight[entry] : 1.0f};
        if (owner >= 0 && !d.repeat) entries[k].local = d.plan.local(d.plan.id_at(entry));
    }
}

bool any(const i32* slots, i32 n) {
    return std::any_of(slots, slots + n, [](i32 slot) { return slot >= 0; });
}

}  // namespace

i32 Sender::missing_credit() const {
    if (chunk_before() < 0) return -1;
    for (i32 domain = 0; domain < d_.r.domains(); ++domain)
        if (goes_to(domain) && load_acquire(credit(domain)) != word_signal(d_.r.tag, static_cast<u32>(chunk_before()))) return domain;
    return -1;
}

Missing Sender::missing() const {
    const i32 domain = std::max(missing_credit(), 0);
    return {d_.r.forwarder(domain), credit(domain), d_.r.tag};
}

void Sender::send() {
    const i32 first = next_ * d_.a.chunk_tokens;
    const i32 end = std::min(first + d_.a.chunk_tokens, d_.a.num_tokens);
    i32* cursors = d_.repeat ? nullptr : d_.plan.cursors(next_);
    Delivery delivery(d_, d_.r.me, next_);
    Entry entries[kMaxTopk];
    for (i32 number = first; number < end; ++number) {
        if (!d_.repeat) place_token(d_, number, cursors);
        const i32* slots = d_.token_slot + static_cast<i64>(number) * d_.r.ranks;
        if (!any(slots, d_.r.ranks)) continue;
        write_metadata(d_, number, entries);
        const Payload payload = pack(d_.a, number, packed_);
        delivery.deliver({d_.r.me, number, entries, slots + d_.r.first}, payload);
        for (i32 domain = 0; domain < d_.r.domains(); ++domain) {
            const Token there{d_.r.me, number, entries, slots + domain * d_.r.scaleup_ranks};
            if (domain == d_.r.domain() || !any(there.slots, d_.r.scaleup_ranks)) continue;
            write_send_slot(there, payload);
            d_.direct ? put_direct(domain, there) : put(domain, there);
        }
    }
    delivery.raise_flags();
    d_.direct ? signal_owners() : signal_forwarders();
    next_ += stride_;
}

void Sender::signal_owners() const {
    for (i32 rank = 0; rank < d_.r.ranks; ++rank)
        if (!d_.r.reaches(rank) && !d_.r.masked(rank)) d_.sent_direct.end_part(d_.r, rank, true);
}

void Sender::signal_forwarders() const {
    for (i32 domain = 0; domain < d_.r.domains(); ++domain) {
        if (!goes_to(domain)) continue;
        const u64 received = received_signal(d_.a.ctx.shape, d_.r.column_at_forwarder(domain), next_, d_.a.chunk_tokens);
        d_.r.link().signal(d_.r.forwarder(domain), received, word_signal(d_.r.tag, static_cast<u32>(next_)));
    }
}

// Assemble the send slot of a token for another domain: header, entries, flat rows, row, scales.
void Sender::write_send_slot(const Token& token, const Payload& payload) {
    const DispatchArgs& a = d_.a;
    const Shape& shape = a.ctx.shape;
    send_slot_.resize(received_token_bytes(shape, a.row_bytes, a.scale_bytes));
    const ReceivedHead head{d_.r.tag, token.number, {}};
    const i64 slots_at = sizeof(ReceivedHead) + d_.topk * sizeof(Entry);
    std::memcpy(send_slot_.data(), &head, sizeof(head));
    std::memcpy(send_slot_.data() + sizeof(ReceivedHead), token.entries, d_.topk * sizeof(Entry));
    std::memcpy(send_slot_.data() + slots_at, token.slots, d_.r.scaleup_ranks * sizeof(i32));
    std::memcpy(send_slot_.data() + received_row(shape), payload.row, a.row_bytes);
    if (a.scale_bytes > 0) std::memcpy(send_slot_.data() + received_scales(shape, a.row_bytes), payload.scales, a.scale_bytes);
}

// Put the send slot to the forwarder of another domain, once for all ranks there.
void Sender::put(i32 domain, const Token& token) {
    const u64 there = receive_at(d_.a.ctx.window, d_.a.ctx.shape, d_.r.column_at_forwarder(domain), token.number);
    d_.r.link().put(d_.r.forwarder(domain), there, send_slot_.data(), send_slot_.size());
}

// Put the send slot to each rank of another domain that owns one of the token's experts.
void Sender::put_direct(i32 domain, const Token& token) {
    const u64 there = direct_at(d_.a.ctx.window, d_.a.ctx.shape, d_.r.tag, d_.r.me, token.number);
    for (i32 i = 0; i < d_.r.scaleup_ranks; ++i)
        if (token.slots[i] >= 0) d_.r.link().put(domain * d_.r.scaleup_ranks + i, there, send_slot_.data(), send_slot_.size());
}

}  // namespace moecomm::host
