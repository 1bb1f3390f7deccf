#include "forward.h"

#include <algorithm>

namespace moecomm::host {

// The second half of a split dispatch resumes after the chunks that the first has forwarded.
Forward::Forward(Dispatch& d, i32 worker, i32 stride) : d_(d), stride_(stride), next_(d.r.domains(), worker) {
    for (i32 domain = 0; domain < d_.r.domains(); ++domain)
        if (domain != d_.r.domain()) skip_forwarded(domain);
}

void Forward::skip_forwarded(i32 domain) {
    const auto forwarded = [&] {
        return has_tag(at<const u64>(d_.a.ctx, d_.r.me, arrived_at(d_.a.ctx.window, d_.a.ctx.shape, source(domain), next_[domain])),
                       d_.r.tag);
    };
    while (next_[domain] < chunks(domain) && forwarded()) next_[domain] += stride_;
}

bool Forward::has_arrived(i32 domain) const {
    if (domain == d_.r.domain() || next_[domain] >= chunks(domain)) return false;
    return load_acquire(signal(domain)) == word_signal(d_.r.tag, static_cast<u32>(next_[domain]));
}

bool Forward::any_arrived() const {
    for (i32 domain = 0; domain < d_.r.domains(); ++domain)
        if (has_arrived(domain)) return true;
    return false;
}

void Forward::forward_arrived() {
    for (i32 domain = 0; domain < d_.r.domains(); ++domain)
        for (; has_arrived(domain); skip_forwarded(domain)) forward_chunk(domain, next_[domain]);
}

i32 Forward::first_open(i32 rings) const {
    for (i32 domain = 0; domain < d_.r.domains(); ++domain)
        if (domain != d_.r.domain() && next_[domain] + rings * ring(domain) < chunks(domain)) return domain;
    return -1;
}

Missing Forward::missing() const {
    const i32 domain = first_open(0);
    return {source(domain), signal(domain), d_.r.tag};
}

void Forward::forward_chunk(i32 domain, i32 chunk) const {
    const DispatchArgs& a = d_.a;
    const Shape& shape = a.ctx.shape;
    const i32 first = chunk * sent(domain).chunk_tokens;
    const i32 end = std::min(first + sent(domain).chunk_tokens, sent(domain).num_tokens);
    Delivery delivery(d_, source(domain), chunk);
    for (i32 number = first; number < end; ++number) {
        const u8* here = at<const u8>(a.ctx, d_.r.me, receive_at(a.ctx.window, shape, domain, number));
        const ReceivedHead& head = *reinterpret_cast<const ReceivedHead*>(here);
        const bool comes = head.tag == d_.r.tag && head.token == number;
        const Entry* entries = reinterpret_cast<const Entry*>(here + sizeof(ReceivedHead));
        const Token token{source(domain), number, entries, reinterpret_cast<const i32*>(entries + d_.topk)};
        if (!d_.repeat) record_route(domain, number, comes ? &token : nullptr);
        if (comes) delivery.deliver(token, {here + received_row(shape), here + received_scales(shape, a.row_bytes)});
    }
    delivery.raise_flags();
    if (chunk + ring(domain) >= chunks(domain)) return;
    const u64 credit = receive_credit(shape, d_.r.domain(), chunk, sent(domain).chunk_tokens);
    d_.r.link().signal(source(domain), credit, word_signal(d_.r.tag, static_cast<u32>(chunk)));
}

// Keep the token's route for combine; -1 everywhere for a token that has no row in this domain.
void Forward::record_route(i32 domain, i32 token, const Token* arrived) const {
    const Shape& shape = d_.a.ctx.shape;
    i32* kept = memory<i32>(d_.a.route.forwarded) + (static_cast<i64>(domain) * shape.max_tokens + token) * forwarded_words(shape);
    if (arrived == nullptr) return static_cast<void>(std::fill_n(kept, forwarded_words(shape), -1));
    for (i32 k = 0; k < d_.topk; ++k) {
        kept[k] = arrived->entries[k].row;
        kept[d_.topk + k] = arrived->entries[k].owner;
    }
    std::copy_n(arrived->slots, d_.r.scaleup_ranks, kept + 2 * d_.topk);
}

}  // namespace moecomm::host
