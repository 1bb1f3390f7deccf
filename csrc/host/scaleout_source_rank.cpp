#include "scaleout_source_rank.h"

namespace moecomm::host {

bool SourceReduce::comes_from(i32 domain, i32 token) const {
    const i32* slots = memory<const i32>(c_.a.route.token_slot) + static_cast<i64>(token) * c_.r.ranks + domain * c_.r.scaleup_ranks;
    return std::any_of(slots, slots + c_.r.scaleup_ranks, [](i32 slot) { return slot >= 0; });
}

// The first owner of the chunk's tokens that has not signaled.  Ranks without rows of this rank's tokens send no signal.
i32 SourceReduce::missing_owner(i32 chunk) const {
    for (i32 rank = 0; rank < c_.r.ranks; ++rank) {
        if (c_.r.reaches(rank) || load_acquire(direct_from(rank)) == tag_signal(c_.r.tag)) continue;
        for (i32 token = first_token(chunk); token < end_token(chunk); ++token)
            if (memory<const i32>(c_.a.route.token_slot)[static_cast<i64>(token) * c_.r.ranks + rank] >= 0) return rank;
    }
    return -1;
}

// A return-forwarder signals only chunks of which its domain has rows.
i32 SourceReduce::missing_rank(i32 chunk) const {
    if (direct_) return missing_owner(chunk);
    for (i32 domain = 0; domain < c_.r.domains(); ++domain) {
        if (domain == c_.r.domain() || load_acquire(signal(domain, chunk)) == word_signal(c_.r.tag, static_cast<u32>(chunk))) continue;
        for (i32 token = first_token(chunk); token < end_token(chunk); ++token)
            if (comes_from(domain, token)) return c_.r.forwarder(domain);
    }
    return -1;
}

Missing SourceReduce::scaleout_missing(i32 chunk) const {
    const i32 rank = std::max(missing_rank(chunk), 0);
    return {rank, direct_ ? direct_from(rank) : signal(domain_of(c_.shape, rank), chunk), c_.r.tag};
}

void SourceReduce::check_row(i32 rank, i32 entries, i32 token, const u8* row, Type type) const {
    const CorruptRow name{rank, c_.r.me, token};
    const i64 bytes = staged_bytes(type, c_.a.hidden);
    c_.checks->flip_now(name, row, bytes);
    c_.checks->compare(c_.r.tag, entries, name, c_.hash_of(row, bytes));
}

// With checks: compare the direct rows and the sums of other domains with what their ranks sent.
void SourceReduce::check_domains(i32 token) const {
    const i32* slots = memory<const i32>(c_.a.route.token_slot) + static_cast<i64>(token) * c_.r.ranks;
    for (i32 domain = 0; domain < c_.r.domains() && c_.checks != nullptr; ++domain) {
        if (domain == c_.r.domain() || !comes_from(domain, token)) continue;
        if (!direct_) {
            const i32 from = c_.r.forwarder(domain);
            check_row(from, c_.checks->sums_of(c_.r.me), token, returned(domain, token), c_.scaleout_type);
            continue;
        }
        for (i32 rank = domain * c_.r.scaleup_ranks; rank < (domain + 1) * c_.r.scaleup_ranks; ++rank)
            if (slots[rank] >= 0) check_row(rank, c_.checks->rows_of(c_.r.me), token, c_.put_by(rank, token), c_.staged_type);
    }
}

// Sum the direct rows of a domain's ranks and round as a return-forwarder would, so that both ways give the same bits.
void SourceReduce::add_direct(float* sum, i32 domain, i32 token, i64 column, i64 n) const {
    const i32* slots = memory<const i32>(c_.a.route.token_slot) + static_cast<i64>(token) * c_.r.ranks;
    Sums there{};
    for (i32 rank = domain * c_.r.scaleup_ranks; rank < (domain + 1) * c_.r.scaleup_ranks; ++rank)
        if (slots[rank] >= 0) add_staged(there.of, c_.put_by(rank, token), c_.staged_type, 1.0f, c_.a.hidden, column, n);
    u8 rounded[sizeof there];  // a staged row of n columns
    stage_columns(rounded, there.of, c_.scaleout_type, n, 0, n);
    add_staged(sum, rounded, c_.scaleout_type, 1.0f, n, 0, n);
}

// Sum over the domains, in their order.  protocol/domains.h bounds the difference from a sum within a single domain.
void SourceReduce::add_domains(float* sum, i32 token, i64 column, i64 n) const {
    if (c_.r.domains() == 1) return gather_.add_up(sum, token, column, n);
    std::fill_n(sum, n, 0.0f);
    for (i32 domain = 0; domain < c_.r.domains(); ++domain) {
        if (!comes_from(domain, token)) continue;
        if (domain == c_.r.domain()) {
            Sums here;
            gather_.add_up(here.of, token, column, n);
            add_row(sum, reinterpret_cast<const u8*>(here.of), Type::fp32, 1.0f, n);
        } else if (direct_) {
            add_direct(sum, domain, token, column, n);
        } else {
            add_staged(sum, returned(domain, token), c_.scaleout_type, 1.0f, c_.a.hidden, column, n);
        }
    }
}

void SourceReduce::load_grads(i32 token) const {
    float* grads = memory<float>(c_.a.out_weight_grads) + static_cast<i64>(token) * c_.topk;
    if (c_.a.sum_grads != 0) return sum_grads(token, grads);
    for (i32 k = 0; k < c_.topk; ++k) {
        const i32 owner = tokens_.owners_of(token)[k];
        grads[k] = owner >= 0 ? grads_of(owner, token)[k] : 0.0f;
    }
}

// The token's gradients from `rank`: its staged or direct row, or the row that its domain returned for all of its ranks.
const float* SourceReduce::grads_of(i32 rank, i32 token) const {
    const u8* row = c_.r.reaches(rank) ? c_.staged(rank, c_.r.me, token)
                    : direct_          ? c_.put_by(rank, token)
                                       : returned(domain_of(c_.shape, rank), token);
    return reinterpret_cast<const float*>(row + c_.grads_at);
}

// Sum the gradients of all ranks with a row of the token, in rank order.  A domain returns the sum over its ranks, which counts once.
void SourceReduce::sum_grads(i32 token, float* grads) const {
    const i32* slots = memory<const i32>(c_.a.route.token_slot) + static_cast<i64>(token) * c_.r.ranks;
    std::fill_n(grads, c_.topk, 0.0f);
    for (i32 rank = 0; rank < c_.r.ranks; ++rank) {
        if (slots[rank] < 0) continue;
        const float* there = grads_of(rank, token);
        for (i32 k = 0; k < c_.topk; ++k) grads[k] += there[k];
        if (!c_.r.reaches(rank) && !direct_) rank = (domain_of(c_.shape, rank) + 1) * c_.r.scaleup_ranks - 1;
    }
}

// Write the token's row of `out`: add the bias to the sum, or start the sum from it, then round once.
void SourceReduce::pull_token(i32 token) {
    gather_.check(token);
    check_domains(token);
    const CombineArgs& a = c_.a;
    const Type bias_type = static_cast<Type>(a.bias_type);
    const u8* bias = a.bias != 0 ? memory<const u8>(a.bias) + token * a.bias_stride : nullptr;
    u8* out = memory<u8>(a.out) + token * a.out_stride;
    for (i64 column = 0; column < a.hidden; column += kColumns) {
        const i64 n = std::min<i64>(kColumns, a.hidden - column);
        if (a.bias_first != 0) {
            gather_.add_up(scratch_, token, column, n, bias);
        } else {
            add_domains(scratch_, token, column, n);
            if (bias != nullptr) add_row(scratch_, bias + column * bytes_of(bias_type), bias_type, 1.0f, n);
        }
        round_row(out + column * bytes_of(c_.type), scratch_, c_.type, n);
    }
    if (a.out_weight_grads != 0) load_grads(token);
}

// Grant the return-forwarders the credit for the next chunk in the places of this one.
void SourceReduce::pass_on(i32 chunk) {
    if (direct_ || !followed(chunk)) return;
    for (i32 domain = 0; domain < c_.r.domains(); ++domain) {
        if (domain == c_.r.domain() || c_.r.forwarder(domain) < 0) continue;
        const u64 credit = return_credit(c_.shape, c_.r.column_at_forwarder(domain), chunk, tokens_.chunk_tokens);
        c_.r.link().signal(c_.r.forwarder(domain), credit, word_signal(c_.r.tag, static_cast<u32>(chunk)));
    }
}

}  // namespace moecomm::host
