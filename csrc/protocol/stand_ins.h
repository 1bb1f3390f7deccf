// Forwarders while ranks are masked (Buffer.mask()), several domains. A living rank of the domain stands in for a masked forwarder. All
// ranks compute the same stand-ins from the mask, so no words are exchanged: of the n living ranks of a domain, in their order, the j-th
// masked rank has the (j % n)-th. A domain whose ranks are all masked has no forwarders; no token goes there.
//
// A rank then forwards for several source ranks of a domain, each in a share of the domain's ring: share 0 in its own name, share
// 1 + j / n in that of the j-th masked rank. All rings of the Buffer are divided into equally many shares, `ring_shares`, so that one
// ring_tokens fits all of them: the rounds of these ranks use a Shape with shared_ring_tokens, in the same window. Column
// share * domains + domain of rings of that length lies where it overlaps no other column.
//
// The rings stay free of circular waits (layout.h): forwarders still wait only for chunks to land, in the order of chunks.
#pragma once
#include "domains.h"

namespace moecomm {

// `Masked`: u64 of up to 64 ranks, or const u64*, as Mask::ranks.
MOECOMM_BOTH constexpr bool is_in_mask(u64 masked, i32 rank) { return (masked >> rank & 1) != 0; }
MOECOMM_BOTH constexpr bool is_in_mask(const u64* masked, i32 rank) { return is_in_mask(masked[rank / 64], rank % 64); }
template <class Masked>
MOECOMM_BOTH constexpr i32 masked_between(Masked masked, i32 rank, i32 end) {
    i32 count = 0;
    for (; rank < end; ++rank) count += is_in_mask(masked, rank) ? 1 : 0;
    return count;
}
// The n-th rank from `first` on that is masked, or is not.
template <class Masked>
MOECOMM_BOTH constexpr i32 nth_rank(Masked masked, i32 first, i32 n, bool is_masked) {
    while (is_in_mask(masked, first) != is_masked || n-- > 0) ++first;
    return first;
}

// `rank` forwards in place of another rank, in this share of its rings; -1: its domain has no ranks left.
struct StandIn {
    i32 rank, share;
};
template <class Masked>
MOECOMM_BOTH constexpr StandIn stand_in(const Shape& s, Masked masked, i32 forwarder) {
    if (!is_in_mask(masked, forwarder)) return {forwarder, 0};
    const i32 first = domain_of(s, forwarder) * domain_ranks(s), end = first + domain_ranks(s);
    const i32 living = domain_ranks(s) - masked_between(masked, first, end), nth = masked_between(masked, first, forwarder);
    if (living == 0) return {-1, 0};
    return {nth_rank(masked, first, nth % living, false), 1 + nth / living};
}
// The rank in whose name a rank forwards in a share of its rings; -1: none.
template <class Masked>
MOECOMM_BOTH constexpr i32 forwards_as(const Shape& s, Masked masked, i32 rank, i32 share) {
    if (share == 0) return rank;
    const i32 first = domain_of(s, rank) * domain_ranks(s), end = first + domain_ranks(s);
    const i32 gone = masked_between(masked, first, end),
              nth = (share - 1) * (domain_ranks(s) - gone) + rank - first - masked_between(masked, first, rank);
    return nth < gone ? nth_rank(masked, first, nth, true) : -1;
}

// Shares of each ring.
template <class Masked>
MOECOMM_BOTH constexpr i32 ring_shares(const Shape& s, Masked masked) {
    i32 most = 1;
    for (i32 first = 0; first < s.ranks; first += domain_ranks(s)) {
        const i32 gone = masked_between(masked, first, first + domain_ranks(s)), living = domain_ranks(s) - gone;
        if (living > 0 && 1 + ceil_div(gone, living) > most) most = 1 + ceil_div(gone, living);
    }
    return most;
}
// Tokens of a share: whole chunks, whatever their size. At least most_chunk_tokens().
MOECOMM_BOTH constexpr i32 shared_ring_tokens(i32 ring_tokens, i32 shares) {
    const i32 tokens = ring_tokens / shares;
    if (tokens >= kMaxChunk) return tokens - tokens % kMaxChunk;
    i32 whole = 1;
    while (2 * whole <= tokens) whole *= 2;
    return whole;
}
// The most tokens of a chunk, such that one fits whoever is masked. Buffers have rings of at least domain_ranks tokens.
MOECOMM_BOTH constexpr i32 most_chunk_tokens(const Shape& s) {
    if (domains(s) == 1) return kMaxChunk;
    const i32 share = shared_ring_tokens(s.ring_tokens, domain_ranks(s));
    return share < kMaxChunk ? share : kMaxChunk;
}
// Column of a share of the ring of a domain.
MOECOMM_BOTH constexpr i32 column_of(const Shape& s, i32 domain, i32 share) { return share * domains(s) + domain; }

}  // namespace moecomm
