// Scale-out: rounds across several domains. Ranks of one domain load and store each other's windows. Ranks of different domains reach each
// other by `put` and `signal` alone, over slow links; a token crosses them once for each domain. With D domains of L ranks, rank r has
// index r % L in domain r / L.
//
// The route of a token from its source rank s in domain a to the owners of its experts in domain b, and back:
//
//   tagged words  s -> all ranks       round headers and counts; to other domains one put, then a signal
//   dispatch      s -> forwarder       The forwarder is the rank of b with the index of s. A token (ReceivedHead, row, scales) is put
//                                      into `receive_buffer` once, however many of its experts b has; kernels put consecutive tokens
//                                      of a chunk at once (joins_tokens). After the chunk, `received`.
//                 forwarder -> owners  stores each row where s, which knows all counts, has specified, and signals `arrived` in the
//                                      name of s, as a source in the owners' domain would. Then it grants s the chunk's credit.
//   combine       owners -> forwarder  stage for s as for any source rank, but signal `reduced` to the forwarder, which pulls, adds in
//                                      rank order, and grants the owners their credits.
//                 forwarder -> s       puts the sum (and gradients of weights) into `returned`, kernels those of consecutive tokens of
//                                      a chunk at once; after a chunk, its signal
//                 s                    adds the rows of its own domain, then the sums of all domains in domain order; rounds once,
//                                      and grants the forwarders their credits.
//
// Weights that s gives to a combine go to every rank of the other domains in one put, ahead of its tagged words. A rank that has received
// the tagged words has the weights, including the forwarders that reduce rows in place.
//
// Few tokens (goes_direct) use no forwarder, and no rank waits for a free place: the parity of the round, the sender and the token alone
// determine the place of a row, as with packets.
//
//   dispatch      s -> owners          one put for each (token, rank) into `packets`; after all puts, one signal for each rank. The
//                                      head says where the token comes among those of s; the owner finds its rows, and stores them.
//   combine       owners -> s          one put for each token, of the row that the owner would have staged; then the signal
//                 s                    adds up each domain as its forwarder would have, so that the result has the same bits.
//
// Two parities are enough: a sender of round n + 2 has received the tagged words of round n + 1 from all ranks, and a rank sends those
// after it has finished round n. A dispatch_begin would break that, so it uses forwarders. The same holds for the source of a put, if it
// has a place for each parity, too. So kernels write rows that leave before the tagged words have come to the places, in their own window,
// of direct rows from ranks of their own domain, which send none: direct_at with such a rank.
//
// Error bound. The sum of a token over n ranks of D' domains is a sum of sums. Let u = 2^-24, g(n) = n u / (1 - n u), and A = the sum of
// the magnitudes of the ranks' rows. Each order has an error of at most g(m) A if no row goes through more than m rounding additions. In
// the order of one domain, m = n - 1, the first addition being to 0. With several domains, m is at most L - 1 in a domain and then D' - 1,
// and never more than n - 1. So the two results differ by at most (g(n - 1) + g(min(n - 1, L + D' - 2))) A, before the one rounding of the
// result. With a 16-bit `wire`, the sum of another domain is rounded when it crosses, by at most w times itself (w = 2^-8 bfloat16; 2^-11
// float16, above underflow), and then goes through D' - 1 additions: another w (1 + g(L - 1)) (1 + g(D' - 1)) A. If all rows of a token are
// in one domain and wire is float32, the bits are equal. With e4m3 and int8, the loss is that of travelled() in
// moecomm/combine/reference.py, once for the row of each rank and once more for the sum of another domain.
#pragma once
#include "slots.h"

namespace moecomm {

MOECOMM_BOTH constexpr i32 domain_of(const Shape& s, i32 rank) { return rank / domain_ranks(s); }
MOECOMM_BOTH constexpr i32 index_of(const Shape& s, i32 rank) { return rank % domain_ranks(s); }
// The rank of `domain` that receives what `rank` sends to that domain, and sends what that domain returns to `rank`; if it is masked, its
// stand-in does (stand_ins.h).
MOECOMM_BOTH constexpr i32 forwarder_of(const Shape& s, i32 rank, i32 domain) { return domain * domain_ranks(s) + index_of(s, rank); }

// Indices into `signals`. Links add to signals. Each signal has one writer, which can therefore make it any value: a word_signal or
// tag_signal.
MOECOMM_BOTH constexpr u64 tagged_words_signal(i32 from) { return from; }  // tagged_words_value of the sender's latest round
// Grows by one step a round, from 0, so that kernels add the same amount each time.
MOECOMM_BOTH constexpr u64 tagged_words_value(u32 tag) { return tag_signal(tag - 1); }
MOECOMM_BOTH constexpr bool have_tagged_words_arrived(u64 signal, u32 tag) { return has_reached(signal_tag(signal) + 1, tag, tag); }
constexpr u64 kReceived = 0, kReceiveCredit = 1, kReturned = 2, kReturnCredit = 3;
MOECOMM_BOTH constexpr u64 place_signal(const Shape& s, u64 kind, i32 column, i32 chunk, i32 chunk_tokens) {
    const u64 place = static_cast<u64>(column) * s.ring_tokens + chunk % ring_chunks(s, chunk_tokens);
    return 3 * s.ranks + kSignalsOfPlace * place + kind;
}
// At the forwarder, by column of the source rank (column_of).
MOECOMM_BOTH constexpr u64 received_signal(const Shape& s, i32 column, i32 chunk, i32 chunk_tokens) {
    return place_signal(s, kReceived, column, chunk, chunk_tokens);
}
// At the source, by domain of the forwarder.
MOECOMM_BOTH constexpr u64 receive_credit(const Shape& s, i32 domain, i32 chunk, i32 chunk_tokens) {
    return place_signal(s, kReceiveCredit, domain, chunk, chunk_tokens);
}
// At the source rank, by domain of the forwarder.
MOECOMM_BOTH constexpr u64 returned_signal(const Shape& s, i32 domain, i32 chunk, i32 chunk_tokens) {
    return place_signal(s, kReturned, domain, chunk, chunk_tokens);
}
// At the forwarder, by column of the source rank.
MOECOMM_BOTH constexpr u64 return_credit(const Shape& s, i32 column, i32 chunk, i32 chunk_tokens) {
    return place_signal(s, kReturnCredit, column, chunk, chunk_tokens);
}
// At the receiver of direct rows, by parity and sender: the round of the sender's last complete batch.
MOECOMM_BOTH constexpr u64 direct_signal(const Shape& s, u32 tag, i32 from) {
    return s.ranks + round_parity(tag) * static_cast<u64>(s.ranks) + from;
}
// By rank of another domain: the number of the last agreement (csrc/device/between_rounds.cuh).
MOECOMM_BOTH constexpr u64 agreement_signal(const Shape& s, i32 from) { return signals(s) + from; }
MOECOMM_BOTH constexpr u64 signal_at(const WindowLayout& w, u64 which) { return w.signals + which * sizeof(u64); }

// Send slots in the sender's own window (kernels): a slot is free when the place it is put to is free. signal_value_at holds the last value
// of a signal, with the column of the signal's reader here.
MOECOMM_BOTH constexpr u64 send_slot_at(const WindowLayout& w, const Shape& s, i32 domain, i32 token) {
    return second_half(w.receive_buffer, w.returned) + (receive_at(w, s, domain, token) - w.receive_buffer);
}
MOECOMM_BOTH constexpr u64 signal_value_at(const WindowLayout& w, u64 which) {
    return second_half(w.signals, w.counters) + which * sizeof(u64);
}

// `reduced` at the rank that pulls the source rank's rows, by reducing rank.
MOECOMM_BOTH constexpr u64 reduced_for(const WindowLayout& w, const Shape& s, i32 source_rank, i32 from, i32 chunk) {
    return domains(s) == 1 ? reduced_at(w, s, from, chunk) : reduced_at(w, s, source_rank * domain_ranks(s) + index_of(s, from), chunk);
}

// Entry for the k-th expert of a token, as it travels.
struct Entry {
    i32 owner;  // -1: no expert
    i32 row;    // at the owner; kernels, if the token goes direct and is no repeat: its place among the sender's entries of the expert
    i32 local;  // the expert's index at its owner; unset in a repeat
    float weight;
};
// Header of a token in a receive buffer. Entry[topk] follows, then i32[domain_ranks]: the flat row at each rank of the domain, -1 for none.
// A header with another round or token means that this token has no expert in the domain.
struct ReceivedHead {
    u32 tag;
    i32 token;
    i32 pad[2];
};
// Offsets of the row and of its scales in a token of a receive buffer, and the token's size.
MOECOMM_BOTH constexpr i64 received_row(const Shape& s) {
    return align_up<i64>(sizeof(ReceivedHead) + s.topk * sizeof(Entry) + domain_ranks(s) * sizeof(i32), 16);
}
MOECOMM_BOTH constexpr i64 received_scales(const Shape& s, i64 row_bytes) { return received_row(s) + align_up<i64>(row_bytes, 16); }
MOECOMM_BOTH constexpr i64 received_token_bytes(const Shape& s, i64 row_bytes, i64 scale_bytes) {
    return received_scales(s, row_bytes) + align_up<i64>(scale_bytes, 16);
}

// True if one put carries consecutive tokens of a chunk, with the unused bytes between them: these cost less than a message, which costs as
// much as `message_bytes`. Places have the same size in every round, so the unused bytes never cover a ReceivedHead.
MOECOMM_BOTH constexpr bool joins_tokens(const Shape& s, i64 token_bytes, i64 message_bytes) {
    return s.receive_bytes - token_bytes <= message_bytes;
}

// Room for a direct token in `packets`: a token as a forwarder receives it, or, after an unused ReceivedHead (which thus never looks like
// one of this round), a staged row. Kernels put all of a rank's tokens from send slots in its rings, if they do not leave early.
MOECOMM_BOTH constexpr i64 direct_bytes(const Shape& s) {
    const i64 row = sizeof(ReceivedHead) + s.staged_row_bytes;
    return align_up<i64>(s.receive_bytes > row ? s.receive_bytes : row, 128);
}
MOECOMM_BOTH constexpr bool goes_direct(const Shape& s, i32 num_tokens) {
    return domains(s) > 1 && num_tokens <= s.ring_tokens && num_tokens * direct_bytes(s) <= s.packet_bytes;
}
MOECOMM_BOTH constexpr u64 direct_at(const WindowLayout& w, const Shape& s, u32 tag, i32 from, i32 token) {
    return packets_at(w, s, tag, from) + static_cast<u64>(token * direct_bytes(s));
}
MOECOMM_BOTH constexpr u64 direct_row_at(const WindowLayout& w, const Shape& s, u32 tag, i32 from, i32 token) {
    return direct_at(w, s, tag, from, token) + sizeof(ReceivedHead);
}

// Words that a forwarder keeps of a token of rank (domain, own index): the rows of its topk experts, their owners, and the flat row at each
// rank of the forwarder's domain.
MOECOMM_BOTH constexpr i64 forwarded_words(const Shape& s) { return 2 * s.topk + domain_ranks(s); }

}  // namespace moecomm
