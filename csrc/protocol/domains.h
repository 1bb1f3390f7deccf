// Several domains.  Ranks of one domain load and store each other's windows; ranks of others are reached by `put` and `signal` alone, over
// a slow link, which a token crosses once a domain.  With D domains of L ranks, rank r is the (r % L)-th of domain r / L.
//
// The way of a token, from its source s in domain a to the owners of its experts in domain b, and home:
//
//   mail       s -> everybody        counts and notices; to other domains one put, then a signal
//   dispatch   s -> relay            the relay is the rank of b with the index of s: one put of the token (Landed, row, scales) into
//                                    `landing`, whatever number of its experts b has; after the last of a chunk, `landed`
//              relay -> owners       stores the row where s, which knows all counts, has said, and raises `arrived` in the name of s: the
//                                    owners can't tell it from a source of their own domain.  Then the credit for the chunk, to s
//   combine    owners -> relay       stage for s as for any home; but `reduced` goes to the relay, which pulls, adds up in the order of
//                                    the ranks, and gives the owners their credits
//              relay -> s            one put of the sum (and gradients of weights) into `returned`; after a chunk, `returned`
//              s                     adds up the rows of its own domain, then the sums of all domains in the order of the domains;
//                                    rounds once, and gives the relays their credits
//
// Weights that s gives a combine itself go to every rank of the other domains ahead of its mail: all of them in one put.  Whoever has
// awaited that mail has them, the relays that add up rows where they lie among them.
//
// Few tokens (goes_direct) have no relay, and nobody waits for a place: where a row goes, only the parity of the round, its sender and
// the token decide, as with packets.
//
//   dispatch   s -> owners           one put a (token, rank), into `packets`; when all are put, the signal, one a rank.  The owner stores
//                                    the rows of its experts itself
//   combine    owners -> s           the same way back: what the owner would have staged, one put a token; then the signal
//              s                     adds up each domain as its relay would have, so that no bit tells how a row came
//
// Two parities are enough: who sends in round n + 2 has heard everybody's mail of round n + 1, which nobody sends before he is through with
// round n.  A dispatch that only begins would break that, and goes by the relays.
//
// The sum of a token over n ranks of D' domains is so a sum of sums.  Against the order of one domain, with u = 2^-24,
// g(n) = n u / (1 - n u) and A = the sum of the magnitudes of the ranks' rows: each order makes at most g(m) A of error where no row goes
// through more than m additions that round.  In the order of one domain that are n - 1, the first addition being to 0; in that of several
// at most L - 1 in a domain and then D' - 1, and never more than n - 1.  So the two differ by at most (g(n - 1) + g(min(n - 1, L + D' -
// 2))) A, before the one rounding of the result.  With `wire` of 16 bits the sum of another domain is rounded when it crosses, by at most w
// times itself (w = 2^-8 bfloat16; 2^-11 float16, above underflow), and that goes through D' - 1 additions: another w (1 + g(L - 1)) (1 +
// g(D' - 1)) A.  If all rows of a token are in one domain and wire is float32, the bits are equal.
#pragma once
#include "slots.h"

namespace moecomm {

MOECOMM_BOTH constexpr i32 domain_of(const Shape& s, i32 rank) { return rank / domain_ranks(s); }
MOECOMM_BOTH constexpr i32 index_of(const Shape& s, i32 rank) { return rank % domain_ranks(s); }
// Who takes what `rank` sends to a domain, and what that domain sends to `rank`.
MOECOMM_BOTH constexpr i32 forwarder_of(const Shape& s, i32 rank, i32 domain) { return domain * domain_ranks(s) + index_of(s, rank); }

// Words of `signals`.  Links add to them; each has one writer, who so can make it any value: those of word_signal and tag_signal.
MOECOMM_BOTH constexpr u64 tagged_words_signal(i32 from) { return from; }  // tagged_words_value of the last mail
// One step a round from 0 on, so that kernels add the same each time.
MOECOMM_BOTH constexpr u64 tagged_words_value(u32 tag) { return tag_signal(tag - 1); }
MOECOMM_BOTH constexpr bool have_tagged_words_arrived(u64 signal, u32 tag) { return has_reached(signal_tag(signal) + 1, tag, tag); }
constexpr u64 kLanded = 0, kReceiveCredit = 1, kReturned = 2, kReturnCredit = 3;
MOECOMM_BOTH constexpr u64 place_signal(const Shape& s, u64 kind, i32 domain, i32 chunk, i32 chunk_tokens) {
    const u64 place = static_cast<u64>(domain) * s.ring_tokens + chunk % ring_chunks(s, chunk_tokens);
    return s.ranks + kind * domains(s) * s.ring_tokens + place;
}
// At the relay, by domain of the source.
MOECOMM_BOTH constexpr u64 landed_signal(const Shape& s, i32 domain, i32 chunk, i32 chunk_tokens) {
    return place_signal(s, kLanded, domain, chunk, chunk_tokens);
}
// At the source, by domain of the relay.
MOECOMM_BOTH constexpr u64 receive_credit(const Shape& s, i32 domain, i32 chunk, i32 chunk_tokens) {
    return place_signal(s, kReceiveCredit, domain, chunk, chunk_tokens);
}
// At the home, by domain of the relay.
MOECOMM_BOTH constexpr u64 returned_signal(const Shape& s, i32 domain, i32 chunk, i32 chunk_tokens) {
    return place_signal(s, kReturned, domain, chunk, chunk_tokens);
}
// At the relay, by domain of the home.
MOECOMM_BOTH constexpr u64 return_credit(const Shape& s, i32 domain, i32 chunk, i32 chunk_tokens) {
    return place_signal(s, kReturnCredit, domain, chunk, chunk_tokens);
}
// At whoever a rank has put something straight: the round of the last of it, by parity and sender.
MOECOMM_BOTH constexpr u64 direct_signal(const Shape& s, u32 tag, i32 from) {
    return s.ranks + kSignalsOfPlace * domains(s) * s.ring_tokens + round_parity(tag) * static_cast<u64>(s.ranks) + from;
}
MOECOMM_BOTH constexpr u64 signal_at(const WindowLayout& w, u64 which) { return w.signals + which * sizeof(u64); }

// Kernels put from our own window: the places from which they do are free when those that they put to are.  And what a signal of
// place_signal, with the domain of its reader, was made last.
MOECOMM_BOTH constexpr u64 send_slot_at(const WindowLayout& w, const Shape& s, i32 domain, i32 token) {
    return receive_at(w, s, domains(s) + domain, token);
}
MOECOMM_BOTH constexpr u64 sum_at(const WindowLayout& w, const Shape& s, i32 domain, i32 token) {
    return returned_at(w, s, domains(s) + domain, token);
}
MOECOMM_BOTH constexpr u64 signal_value_at(const WindowLayout& w, const Shape& s, u64 which) { return signal_at(w, signals(s) + which); }

// `reduced` at whoever pulls the rows of `home`, by the rank that has reduced them.
MOECOMM_BOTH constexpr u64 reduced_for(const WindowLayout& w, const Shape& s, i32 source_rank, i32 from, i32 chunk) {
    return reduced_at(w, s, forwarder_of(s, from, domain_of(s, source_rank)), chunk);
}

// The k-th expert of a token on its way.
struct Entry {
    i32 owner;  // -1: there is none
    i32 row;    // there
    i32 local;  // its number among the experts of the owner; not with a repeat
    float weight;
};
// What lands beside a row: this, Entry[topk], then i32[domain_ranks], the flat row at each rank of the domain, -1 where none.  A place
// that holds another round or token has none for us: this token has no expert in the domain.
struct Landed {
    u32 tag;
    i32 token;
    i32 pad[2];
};
MOECOMM_BOTH constexpr i64 landed_row(const Shape& s) {
    return align_up<i64>(sizeof(Landed) + s.topk * sizeof(Entry) + domain_ranks(s) * sizeof(i32), 16);
}
MOECOMM_BOTH constexpr i64 landed_scales(const Shape& s, i64 row_bytes) { return landed_row(s) + align_up<i64>(row_bytes, 16); }
MOECOMM_BOTH constexpr i64 landed_bytes(const Shape& s, i64 row_bytes, i64 scale_bytes) {
    return landed_scales(s, row_bytes) + align_up<i64>(scale_bytes, 16);
}

// Where a token comes to that goes straight, in `packets`: what lands at a relay, or, behind the place of the Landed, which so never looks
// like one of this round, a staged row.  Kernels put all of a rank's tokens from places in its rings.
MOECOMM_BOTH constexpr i64 direct_bytes(const Shape& s) {
    const i64 row = sizeof(Landed) + s.staged_row_bytes;
    return align_up<i64>(s.receive_bytes > row ? s.receive_bytes : row, 128);
}
MOECOMM_BOTH constexpr bool goes_direct(const Shape& s, i32 num_tokens) {
    return domains(s) > 1 && num_tokens <= s.ring_tokens && num_tokens * direct_bytes(s) <= s.packet_bytes;
}
MOECOMM_BOTH constexpr u64 direct_at(const WindowLayout& w, const Shape& s, u32 tag, i32 from, i32 token) {
    return packets_at(w, s, tag, from) + static_cast<u64>(token * direct_bytes(s));
}
MOECOMM_BOTH constexpr u64 direct_row_at(const WindowLayout& w, const Shape& s, u32 tag, i32 from, i32 token) {
    return direct_at(w, s, tag, from, token) + sizeof(Landed);
}

// What a relay keeps of a token of rank (domain, own index): the rows of its k experts, their owners, and the flat row at each rank of our
// domain.
MOECOMM_BOTH constexpr i64 forwarded_words(const Shape& s) { return 2 * s.topk + domain_ranks(s); }

}  // namespace moecomm
