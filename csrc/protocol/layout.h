// Every byte offset of a window.  All ranks of a Buffer have the same Shape (checked at open), so all windows have the same layout.
#pragma once
#include "packets.h"
#include "round_header.h"

namespace moecomm {

struct Shape {
    i32 ranks, experts, topk, max_tokens;
    i32 ring_tokens;       // staged tokens of each home, a multiple of kMaxChunk: see `staging`
    i32 domain_ranks;      // ranks that load and store each other's windows, neighbours in number: see domains.h; 0: all
    i64 packet_bytes;      // room for the packets of one rank and one round, several domains: for what it puts straight; 0: there are none
    i64 staged_row_bytes;  // bytes of the widest row that combine stages: the fp32 partial sum, and topk fp32 gradients of weights
    i64 heap_bytes;        // room for outputs
    i64 receive_bytes;     // several domains: of the widest token that lands at a relay (domains.h)
};

MOECOMM_BOTH constexpr i32 domain_ranks(const Shape& s) { return s.domain_ranks != 0 ? s.domain_ranks : s.ranks; }
MOECOMM_BOTH constexpr i32 domains(const Shape& s) { return s.ranks / domain_ranks(s); }

// A rank's own counters.  In device memory, so that a replayed graph counts on.
struct State {
    u32 round;          // rounds begun, modulo 2^31 or more: signal.h
    u32 rejected;       // calls of this rank that failed before their rounds were made: RoundHeader::rejected
    u32 last_combine;   // the tag of the last combine that staged rows, 0 if none
    u32 last_dispatch;  // the tag of the last dispatch, 0 if it was void: what the second half of a split dispatch waits for
    u32 begun;          // kernels: blocks of this launch that have read `round`
    u32 finished;       // kernels: blocks of this launch that are through
    u32 claim;          // kernels: the tag of the last round with a failure that some thread has spoken for
    u32 taken;          // kernels: pieces of a combine that warps have asked for, 0 between launches
};

struct WindowLayout {
    u64 abort;         // u32, its own line: any rank may set it
    u64 state;         // State
    u64 tagged_words;  // u64[2][ranks][num_tagged_words]: word_signal, by round parity and sender: a RoundHeader, then i32[columns], the
                       // sender's tokens per expert and flat rows per rank (dispatch), then, where rows come in packets, a bit a token of
                       // the sender that comes.  Two are enough: a peer's mail of round n + 2 implies that it saw ours of round n + 1,
                       // which we sent after we had finished reading round n.
    u64 arrived;       // u64[ranks][max_tokens]: chunk_signal by source rank and chunk of its tokens
    u64 reduced;   // u64[ranks][max_tokens]: tag_signal by reducing rank and chunk of our tokens; several domains: by domain of the home,
                   // reducing rank of ours and chunk of the home's tokens, because we relay for homes
    u64 credits;   // u64[ranks][ring_tokens]: word_signal with the number of the chunk that this home has pulled, by home and place in the
                   // ring
    u64 drained;   // u64[ranks]: tag_signal of the last combine whose rows here that rank has read
    u64 ranges;    // u32[ranks][max_tokens]: scratch: the low word of the chunk_signal that each of our chunks has for each rank
    u64 counting;  // u64[kMaxBlocks][columns + 1]: scratch of kernels: word_signal with each block's counts, then its first bad entry
    u64 summed;    // the same: with the counts of all blocks before each, then the first bad entry of all
    u64 packets;   // [2][ranks] times packet_bytes, by round parity and sender, as `mail` is: rows of few tokens (protocol/packets.h);
                   // several domains: what is put straight (domains.h).  Then, where takes_weights, u64[2][ranks][max_tokens][topk]:
                   // word_signal with the bits of a float, by round parity, home, its token and k: the weights that a home gives a combine
                   // itself; those of a home of another domain may be looked at when its mail is here.  Or the ids of a source, in a
                   // dispatch of slips.  Two are enough, as of `mail`: a home posts or puts those of round n + 2 when it has heard our
                   // mail of round n + 1, which we sent after we had finished reading those of round n
    u64 begun;     // RoundHeader[domain_ranks]: scratch: of our domain, in the dispatch that was begun last; several domains
    u64 signals;   // u64[2][signals()]: written by links alone (domains.h), then what ours at others were made last; several domains
    u64 staging;   // [ranks][ring_tokens] rows of staged_row_bytes, by home and token % ring_tokens
    u64 receive_buffer;  // [2][domains][ring_tokens] tokens of receive_bytes, by domain of the source and token % ring_tokens, then as
                         // kernels put them, by domain of the relay; several domains
    u64 returned;  // [2][domains][ring_tokens] rows of staged_row_bytes, by domain that sums and our token % ring_tokens, then as kernels
                   // put them, by domain of the home; several domains
    u64 heap;      // outputs, handed out by runtime/arena
    u64 bytes;
    i32 columns;  // experts + ranks
    i32 num_tagged_words;
};

// By rank: its mail.  By domain and place in a ring: what landed, credits for that, what returned, credits for that.  By parity and rank:
// what came straight.
constexpr u64 kSignalsOfPlace = 4;
MOECOMM_BOTH constexpr u64 signals(const Shape& s) {
    return domains(s) > 1 ? 3 * s.ranks + kSignalsOfPlace * domains(s) * s.ring_tokens : 0;
}

// Whether homes may give a combine routing weights of their own: by the sizes of the Buffer alone, which all ranks know alike, however
// many tokens there are in the round.
constexpr i64 kMostWeights = 4096;  // of a home: 64 KB of a window for each
MOECOMM_BOTH constexpr bool takes_weights(const Shape& s) { return static_cast<i64>(s.max_tokens) * s.topk <= kMostWeights; }

MOECOMM_BOTH WindowLayout window_layout(const Shape& s) {
    constexpr u64 line = 256;
    WindowLayout w{};
    w.columns = s.experts + s.ranks;
    w.num_tagged_words = kHeaderWords + w.columns + kWantedWords;
    const u64 ranks = s.ranks, columns = w.columns, ring = s.ring_tokens, tokens = s.max_tokens > 0 ? s.max_tokens : 1;
    u64 at = 0;
    auto take = [&](u64 bytes) {
        u64 here = at;
        at = align_up(at + bytes, line);
        return here;
    };
    w.abort = take(sizeof(u32));
    w.state = take(sizeof(State));
    w.tagged_words = take(2 * ranks * w.num_tagged_words * sizeof(u64));
    w.arrived = take(ranks * tokens * sizeof(u64));
    w.reduced = take(ranks * tokens * sizeof(u64));
    w.credits = take(ranks * ring * sizeof(u64));
    w.drained = take(ranks * sizeof(u64));
    w.ranges = take(ranks * tokens * sizeof(u32));
    w.counting = take(kMaxBlocks * (columns + 1) * sizeof(u64));
    w.summed = take(kMaxBlocks * (columns + 1) * sizeof(u64));
    w.packets = take(2 * ranks * static_cast<u64>(s.packet_bytes) + (takes_weights(s) ? 2 * ranks * tokens * s.topk * sizeof(u64) : 0));
    w.begun = take(domains(s) > 1 ? domain_ranks(s) * sizeof(RoundHeader) : 0);
    w.signals = take(2 * signals(s) * sizeof(u64));
    w.staging = take(ranks * ring * static_cast<u64>(s.staged_row_bytes));
    const u64 scaleout = domains(s) > 1 ? 2 * domains(s) * ring : 0;
    w.receive_buffer = take(scaleout * static_cast<u64>(s.receive_bytes));
    w.returned = take(scaleout * static_cast<u64>(s.staged_row_bytes));
    w.heap = take(static_cast<u64>(s.heap_bytes));
    w.bytes = at;
    return w;
}

MOECOMM_BOTH constexpr u64 tagged_words_at(const WindowLayout& w, i32 ranks, u32 tag, i32 from) {
    return w.tagged_words + (round_parity(tag) * static_cast<u64>(ranks) + from) * w.num_tagged_words * sizeof(u64);
}
MOECOMM_BOTH constexpr u64 arrived_at(const WindowLayout& w, const Shape& s, i32 from, i32 chunk) {
    return w.arrived + (static_cast<u64>(from) * s.max_tokens + chunk) * sizeof(u64);
}
MOECOMM_BOTH constexpr u64 reduced_at(const WindowLayout& w, const Shape& s, i32 from, i32 chunk) {
    return w.reduced + (static_cast<u64>(from) * s.max_tokens + chunk) * sizeof(u64);
}
MOECOMM_BOTH constexpr u64 drained_at(const WindowLayout& w, i32 from) { return w.drained + static_cast<u64>(from) * sizeof(u64); }
MOECOMM_BOTH constexpr u64 range_at(const WindowLayout& w, const Shape& s, i32 rank, i32 chunk) {
    return w.ranges + (static_cast<u64>(rank) * s.max_tokens + chunk) * sizeof(u32);
}
MOECOMM_BOTH constexpr u64 packets_at(const WindowLayout& w, const Shape& s, u32 tag, i32 from) {
    return w.packets + (round_parity(tag) * static_cast<u64>(s.ranks) + from) * static_cast<u64>(s.packet_bytes);
}
MOECOMM_BOTH constexpr u64 weight_at(const WindowLayout& w, const Shape& s, u32 tag, i32 source_rank, i32 entry) {  // token * topk + k
    const u64 first = w.packets + 2 * s.ranks * static_cast<u64>(s.packet_bytes),
              turn = round_parity(tag) * static_cast<u64>(s.ranks) + source_rank;
    return first + (turn * s.max_tokens * s.topk + entry) * sizeof(u64);
}
MOECOMM_BOTH constexpr u64 counting_at(const WindowLayout& w, i32 block) {
    return w.counting + static_cast<u64>(block) * (w.columns + 1) * sizeof(u64);
}

// The staged row of a home's token.  Rows are staged chunk by chunk, in the same order by every rank, and chunk c goes where chunk
// c - ring_chunks was, once the home has pulled that one (`credits`).  So the ring never closes a circle of waits: of the ranks that wait,
// one waits for the smallest chunk, and every rank has staged what that home needs to pull it.
MOECOMM_BOTH constexpr u64 staged_at(const WindowLayout& w, const Shape& s, i32 source_rank, i32 token) {
    return w.staging + (static_cast<u64>(source_rank) * s.ring_tokens + token % s.ring_tokens) * static_cast<u64>(s.staged_row_bytes);
}
MOECOMM_BOTH constexpr i32 ring_chunks(const Shape& s, i32 chunk_tokens) { return s.ring_tokens / chunk_tokens; }
MOECOMM_BOTH constexpr u64 credit_at(const WindowLayout& w, const Shape& s, i32 source_rank, i32 chunk, i32 chunk_tokens) {
    return w.credits + (static_cast<u64>(source_rank) * s.ring_tokens + chunk % ring_chunks(s, chunk_tokens)) * sizeof(u64);
}

// The rings across domains.  `landing`: chunk c of a source goes where its chunk c - ring_chunks was, once the relay has stored that one
// at its ranks.  A relay waits for what lands and for nothing else, so that every credit comes: no circle.
// `returned`: chunk c of a home goes where chunk c - ring_chunks was, once the home has pulled that one.  A home pulls a chunk when its own
// domain has staged it and all relays have returned it; a relay returns it when its domain has staged it.  So the circle stays open for the
// same reason as in `staging`: of all that are not yet home take the smallest chunk.  What lay in its places before is home, so all credits
// for it are granted or on their way; owners come to it before any later chunk, relays and the home need nothing else.  This holds
// for a rank with one thread because no rank waits for one of these while it could do another (host/combine.cpp).
MOECOMM_BOTH constexpr u64 receive_at(const WindowLayout& w, const Shape& s, i32 domain, i32 token) {
    return w.receive_buffer + (static_cast<u64>(domain) * s.ring_tokens + token % s.ring_tokens) * static_cast<u64>(s.receive_bytes);
}
MOECOMM_BOTH constexpr u64 returned_at(const WindowLayout& w, const Shape& s, i32 domain, i32 token) {
    return w.returned + (static_cast<u64>(domain) * s.ring_tokens + token % s.ring_tokens) * static_cast<u64>(s.staged_row_bytes);
}

}  // namespace moecomm
