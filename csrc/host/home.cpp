#include "home.h"

namespace moecomm::host {

bool Home::comes_from(i32 domain, i32 token) const {
    const i32* slots = memory<const i32>(c_.a.route.token_slot) + static_cast<i64>(token) * c_.r.ranks + domain * c_.r.near;
    return std::any_of(slots, slots + c_.r.near, [](i32 slot) { return slot >= 0; });
}

// A relay says so of chunks of which its domain has rows, and of no others.
i32 Home::missing_domain(i32 chunk) const {
    for (i32 domain = 0; domain < c_.r.domains(); ++domain) {
        if (domain == c_.r.domain() || load_acquire(signal(domain, chunk)) == word_signal(c_.r.tag, static_cast<u32>(chunk))) continue;
        for (i32 token = first_token(chunk); token < end_token(chunk); ++token)
            if (comes_from(domain, token)) return domain;
    }
    return -1;
}

Missing Home::crossing_missing(i32 chunk) const {
    const i32 domain = std::max(missing_domain(chunk), 0);
    return {c_.r.counterpart(domain), signal(domain, chunk), c_.r.tag};
}

// The sum over the domains, in the order of the domains; how far it may be from that of one domain stands in protocol/domains.h.
void Home::add_domains(float* sum, i32 token, i64 column, i64 n) const {
    if (c_.r.domains() == 1) return gather_.add_up(sum, token, column, n);
    std::fill_n(sum, n, 0.0f);
    for (i32 domain = 0; domain < c_.r.domains(); ++domain) {
        if (!comes_from(domain, token)) continue;
        if (domain == c_.r.domain()) {
            Sums here;
            gather_.add_up(here.of, token, column, n);
            add_row(sum, reinterpret_cast<const u8*>(here.of), Type::fp32, n);
        } else {
            add_row(sum, returned(domain, token) + column * bytes_of(c_.crossing_type), c_.crossing_type, n);
        }
    }
}

void Home::bring_grads(i32 token) const {
    float* grads = memory<float>(c_.a.out_weight_grads) + static_cast<i64>(token) * c_.topk;
    for (i32 k = 0; k < c_.topk; ++k) {
        const i32 owner = tokens_.owners_of(token)[k];
        if (owner < 0) {
            grads[k] = 0.0f;
        } else if (c_.r.reaches(owner)) {
            grads[k] = gather_.grad(token, k, owner);
        } else {
            grads[k] = reinterpret_cast<const float*>(returned(domain_of(c_.shape, owner), token) + c_.grads_at)[k];
        }
    }
}

// The sum, then the bias, then one rounding.
void Home::pull_token(i32 token) {
    const CombineArgs& a = c_.a;
    const u8* bias = a.bias != 0 ? memory<const u8>(a.bias) + token * a.bias_stride : nullptr;
    u8* out = memory<u8>(a.out) + token * a.out_stride;
    for (i64 column = 0; column < a.hidden; column += kColumns) {
        const i64 n = std::min<i64>(kColumns, a.hidden - column);
        add_domains(scratch_, token, column, n);
        if (bias != nullptr) add_row(scratch_, bias + column * bytes_of(c_.type), c_.type, n);
        round_row(out + column * bytes_of(c_.type), scratch_, c_.type, n);
    }
    if (a.out_weight_grads != 0) bring_grads(token);
}

// The chunk that comes next in the place of this one may be returned.
void Home::pass_on(i32 chunk) {
    if (!followed(chunk)) return;
    for (i32 domain = 0; domain < c_.r.domains(); ++domain) {
        if (domain == c_.r.domain()) continue;
        const u64 credit = returned_credit(c_.shape, c_.r.domain(), chunk, tokens_.chunk_tokens);
        c_.r.link().signal(c_.r.counterpart(domain), credit, word_signal(c_.r.tag, static_cast<u32>(chunk)));
    }
}

}  // namespace moecomm::host
