// Byte offsets in a window. All ranks of a Buffer have the same Shape (checked at open), so all windows have the same layout.
#pragma once
#include "packets.h"
#include "round_header.h"

namespace moecomm {

// Three numbers are easily taken for each other. Rounds know slots: columns of counts, owners and outputs are by slot. Ids of callers name
// experts. Without a placement (placement.h) an expert is its slot. With one, there may be more slots than experts (replicas, empty slots)
// or more experts than slots (experts of lost ranks).
struct Shape {
    i32 ranks, slots, topk, max_tokens;  // slots of all ranks
    i32 ring_tokens;                     // tokens in the staging ring of each source rank, a multiple of kMaxChunk: see `staging`
    i32 domain_ranks;                    // ranks in a domain, consecutive in number: see domains.h; 0: all ranks
    i64 packet_bytes;                    // room for one sender's packets of one round; several domains: for its direct rows; 0: none
    i64 staged_row_bytes;  // bytes of the widest row that combine stages: the fp32 partial sum, and topk fp32 gradients of weights
    u64 heap_and_experts;  // heap_bytes() and named_experts()
    i64 receive_bytes;     // several domains: bytes of the widest token in a forwarder's receive buffer (domains.h)
};

// Two sizes in one word, so that the arguments of kernels stay as they are: room for outputs, and the experts that callers name, by ids
// from 0 to named_experts() - 1.
constexpr i32 kHeapBits = 44;
constexpr i64 kMostHeapBytes = (1ll << kHeapBits) - 1;
MOECOMM_BOTH constexpr i64 heap_bytes(const Shape& s) { return static_cast<i64>(s.heap_and_experts & static_cast<u64>(kMostHeapBytes)); }
MOECOMM_BOTH constexpr i32 named_experts(const Shape& s) {
    const i32 placed = static_cast<i32>(s.heap_and_experts >> kHeapBits);
    return placed != 0 ? placed : s.slots;
}
// `placed_experts`: named_experts() of a placement; 0: there is none.
MOECOMM_BOTH constexpr u64 heap_and_experts(i64 heap_bytes, i32 placed_experts) {
    return static_cast<u64>(placed_experts) << kHeapBits | static_cast<u64>(heap_bytes);
}

MOECOMM_BOTH constexpr i32 domain_ranks(const Shape& s) { return s.domain_ranks != 0 ? s.domain_ranks : s.ranks; }
MOECOMM_BOTH constexpr i32 domains(const Shape& s) { return s.ranks / domain_ranks(s); }

// Counters of a rank. In device memory, so that a replayed graph continues to count.
struct State {
    u32 round;          // rounds begun, modulo 2^31 or more: signal.h
    u32 rejected;       // calls of this rank that failed before their rounds began: RoundHeader::rejected
    u32 last_combine;   // the tag of the last combine that staged rows, 0 if none
    u32 last_dispatch;  // the tag of the last dispatch, 0 if it was invalid; the second half of a split dispatch continues that round
    u32 blocks_begun;   // kernels: blocks of this launch that have read `round`
    u32 finished;       // kernels: blocks of this launch that have finished
    u32 claim;          // kernels: the tag of the last round whose failure some thread has claimed to report
    u32 next_piece;     // kernels: pieces of a combine that warps have claimed, 0 between launches
};

// Ranks that take no part in rounds (Buffer.mask()), behind State. Only the host of this rank writes it, while no round runs.
constexpr i32 kMaskWords = kMaxHostRanks / 64;
struct Mask {
    u32 since;  // the tag of the first round with these ranks; 0: none has ever been masked. Routes of earlier rounds can't be used
    u32 pad;
    u64 ranks[kMaskWords];  // a bit for each rank
};
MOECOMM_BOTH constexpr bool is_masked(const Mask& mask, i32 rank) { return (mask.ranks[rank / 64] >> (rank % 64) & 1) != 0; }
// True if a route is of a round before those of the mask. Tags wrap around: signal.h.
MOECOMM_BOTH constexpr bool is_stale(const Mask& mask, u32 route_round) {
    return mask.since != 0 && static_cast<i32>(route_round - mask.since) < 0;
}

constexpr u64 kPlacementBytes = 16;  // of Placement, behind which its table lies
// The most words of the table of a placement: one for each expert, and for each slot if it is in a list; and the number of empty slots.
MOECOMM_BOTH constexpr i32 placement_words(i32 named_experts, i32 slots) { return named_experts + slots + 1; }

struct WindowLayout {
    u64 abort;  // u32, its own line: any rank may set it
    u64 state;  // State, then Mask, then Placement and its table (placement.h)
    // u64[2][ranks][num_tagged_words]: word_signal, by round parity and sender: a RoundHeader; i32[columns], the sender's tokens per slot
    // and flat rows per rank (dispatch); then, where rows travel in packets, one bit for each token of the sender that has a row here. Two
    // parities are enough: a peer's words of round n + 2 imply that it saw this rank's words of round n + 1, which this rank sent after it
    // had finished reading round n.
    u64 tagged_words;
    u64 arrived;  // u64[ranks][max_tokens]: chunk_signal by source rank and chunk of its tokens
    // u64[ranks][max_tokens]: tag_signal by reducing rank and chunk of this rank's tokens; several domains: u64[ranks][domain_ranks]
    // [max_tokens], by source rank, reducing rank of this domain and chunk of the source rank's tokens, because this rank return-forwards
    // for source ranks
    u64 reduced;
    u64 credits;   // u64[ranks][ring_tokens]: word_signal with the number of the chunk that the source rank has pulled, by source rank and
                   // place in the ring
    u64 drained;   // u64[ranks]: tag_signal of the last combine whose rows here that rank has read
    u64 ranges;    // u32[ranks][max_tokens]: scratch: the low word of the chunk_signal of each chunk of this rank's tokens, by receiver
    u64 counting;  // u64[kMaxBlocks][columns + 1]: scratch of kernels: word_signal with each block's counts, then its first bad entry
    // u64[kMaxBlocks][columns + 1]: likewise, with the counts of all earlier blocks, then the first bad entry of all blocks. Behind it, if
    // shares_columns, u64[2][columns][2], by round parity: word_signal with a column's sum over all ranks, then over the ranks before this
    // one, for all blocks of this rank. Two parities are enough, as for `tagged_words`.
    u64 summed;
    // [2][ranks] times packet_bytes, by round parity and sender: rows of few tokens (packets.h); several domains: direct rows (domains.h).
    // Then, if takes_weights, u64[2][ranks][max_tokens][topk]: word_signal with the bits of a float, by round parity, source rank, its
    // token and k: the weights that a source rank gives to a combine. Words of a source rank in another domain are valid once its tagged
    // words have arrived. A dispatch of row descriptors stores expert ids there instead. Two parities are enough, as for `tagged_words`: a
    // source rank sends the words of round n + 2 after it has received this rank's tagged words of round n + 1, which this rank sent after
    // it had finished reading round n.
    u64 packets;
    u64 split_headers;   // RoundHeader[ranks]: scratch: headers in the dispatch that was begun last (CPU ranks: of this domain); several
                         // domains
    u64 signals;         // u64[2][all_signals()]: signals that only links write (domains.h), then, from second_half on, the last values of
                         // this rank's signals at other ranks (kernels); several domains
    u64 counters;        // u64[counter_words()]: what this rank has counted (counters.h)
    u64 staging;         // [ranks][ring_tokens] rows of staged_row_bytes, by source rank and token % ring_tokens
    u64 receive_buffer;  // [2][domains][ring_tokens] tokens of receive_bytes, by the source's domain and token % ring_tokens (kernels: the
                         // token's place_of % ring_tokens); the second half holds the send slots of kernels, by the forwarder's domain;
                         // several domains
    u64 returned;        // [2][domains][ring_tokens] rows of staged_row_bytes, by the reducing domain and this rank's token % ring_tokens;
                         // the second half holds the send slots of kernels, by the source rank's domain; several domains
    u64 heap;            // outputs, allocated by runtime/arena.cpp
    u64 bytes;
    i32 columns;  // slots + ranks
    i32 num_tagged_words;
};

// By rank: its tagged words. By domain and place in a ring: received, its credit, returned, its credit. By parity and rank: direct rows.
constexpr u64 kSignalsOfPlace = 4;
MOECOMM_BOTH constexpr u64 signals(const Shape& s) {
    return domains(s) > 1 ? 3 * s.ranks + kSignalsOfPlace * domains(s) * s.ring_tokens : 0;
}
// With those of agreements on who takes part, by rank, which no round uses.
MOECOMM_BOTH constexpr u64 all_signals(const Shape& s) { return domains(s) > 1 ? signals(s) + s.ranks : 0; }

// Words of `counters`: scalars, seven for each peer, and one for each slot of the rank that has most.
constexpr u64 kScalarCounters = 2, kPeerCounters = 7;
MOECOMM_BOTH constexpr u64 counter_words(const Shape& s) { return kScalarCounters + kPeerCounters * s.ranks + ceil_div(s.slots, s.ranks); }

// True if source ranks may give a combine routing weights of their own. Depends on the Buffer's sizes alone, so that all ranks agree
// whatever the number of tokens in the round.
constexpr i64 kMostWeights = 4096;  // of a source rank: 64 KB of a window for each
MOECOMM_BOTH constexpr bool takes_weights(const Shape& s) { return static_cast<i64>(s.max_tokens) * s.topk <= kMostWeights; }

// True if the blocks of a dispatch share the columns that they add up. Up to 16 ranks, all words of a column are loaded at once by one
// thread, and a block that reads all columns takes less time than a word takes from one block to another.
MOECOMM_BOTH constexpr bool shares_columns(i32 ranks) { return ranks > 16; }

MOECOMM_BOTH WindowLayout window_layout(const Shape& s) {
    constexpr u64 line = 256;
    WindowLayout w{};
    w.columns = s.slots + s.ranks;
    w.num_tagged_words = kHeaderWords + w.columns + kWantedWords;
    const u64 ranks = s.ranks, columns = w.columns, ring = s.ring_tokens, tokens = s.max_tokens > 0 ? s.max_tokens : 1;
    u64 at = 0;
    auto take = [&](u64 bytes) {
        u64 here = at;
        at = align_up(at + bytes, line);
        return here;
    };
    w.abort = take(sizeof(u32));
    w.state = take(sizeof(State) + sizeof(Mask) + kPlacementBytes + placement_words(named_experts(s), s.slots) * sizeof(u32));
    w.tagged_words = take(2 * ranks * w.num_tagged_words * sizeof(u64));
    w.arrived = take(ranks * tokens * sizeof(u64));
    w.reduced = take(ranks * (domains(s) > 1 ? domain_ranks(s) : 1) * tokens * sizeof(u64));
    w.credits = take(ranks * ring * sizeof(u64));
    w.drained = take(ranks * sizeof(u64));
    w.ranges = take(ranks * tokens * sizeof(u32));
    w.counting = take(kMaxBlocks * (columns + 1) * sizeof(u64));
    w.summed = take((kMaxBlocks * (columns + 1) + (shares_columns(s.ranks) ? 4 * columns : 0)) * sizeof(u64));
    w.packets = take(2 * ranks * static_cast<u64>(s.packet_bytes) + (takes_weights(s) ? 2 * ranks * tokens * s.topk * sizeof(u64) : 0));
    w.split_headers = take(domains(s) > 1 ? ranks * sizeof(RoundHeader) : 0);
    w.signals = take(2 * align_up(all_signals(s) * sizeof(u64), line));
    w.counters = take(counter_words(s) * sizeof(u64));
    w.staging = take(ranks * ring * static_cast<u64>(s.staged_row_bytes));
    const u64 scaleout = domains(s) > 1 ? domains(s) * ring : 0;
    w.receive_buffer = take(2 * align_up(scaleout * static_cast<u64>(s.receive_bytes), line));
    w.returned = take(2 * align_up(scaleout * static_cast<u64>(s.staged_row_bytes), line));
    w.heap = take(static_cast<u64>(heap_bytes(s)));
    w.bytes = at;
    return w;
}

// Second half of a part of the window. A field for it would be 8 bytes more in the arguments of every kernel.
MOECOMM_BOTH constexpr u64 second_half(u64 part, u64 next_part) { return part + (next_part - part) / 2; }
MOECOMM_BOTH constexpr u64 mask_at(const WindowLayout& w) { return w.state + sizeof(State); }
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
              slot = round_parity(tag) * static_cast<u64>(s.ranks) + source_rank;
    return first + (slot * s.max_tokens * s.topk + entry) * sizeof(u64);
}
MOECOMM_BOTH constexpr u64 counting_at(const WindowLayout& w, i32 block) {
    return w.counting + static_cast<u64>(block) * (w.columns + 1) * sizeof(u64);
}
MOECOMM_BOTH constexpr u64 column_sums_at(const WindowLayout& w, u32 tag, i32 column) {
    const u64 columns = w.columns, first = kMaxBlocks * (columns + 1) + round_parity(tag) * 2 * columns;
    return w.summed + (first + 2 * static_cast<u64>(column)) * sizeof(u64);
}

// The staged row of a source rank's token. Every rank stages chunks in the same order. Chunk c reuses the places of chunk c - ring_chunks
// once the source rank has pulled that chunk (`credits`). No circular waits: of all waiting ranks, one waits for the smallest chunk, and
// every rank has already staged the rows that its source rank needs to pull it.
MOECOMM_BOTH constexpr u64 staged_at(const WindowLayout& w, const Shape& s, i32 source_rank, i32 token) {
    return w.staging + (static_cast<u64>(source_rank) * s.ring_tokens + token % s.ring_tokens) * static_cast<u64>(s.staged_row_bytes);
}
MOECOMM_BOTH constexpr i32 ring_chunks(const Shape& s, i32 chunk_tokens) { return s.ring_tokens / chunk_tokens; }
MOECOMM_BOTH constexpr u64 credit_at(const WindowLayout& w, const Shape& s, i32 source_rank, i32 chunk, i32 chunk_tokens) {
    return w.credits + (static_cast<u64>(source_rank) * s.ring_tokens + chunk % ring_chunks(s, chunk_tokens)) * sizeof(u64);
}

// The rings across domains, by column: a domain, or, while ranks are masked, a part of the ring of a domain (stand_ins.h).
// receive_buffer: chunk c of a source rank reuses the places of its chunk c - ring_chunks once the forwarder has delivered that chunk to
// the ranks of its domain. A forwarder waits only for chunks to land, so every credit is granted and no circular wait exists. returned:
// chunk c of a source rank reuses the places of chunk c - ring_chunks once the source rank has pulled that chunk. A source rank pulls a
// chunk when its own domain has staged the chunk and all forwarders have returned it; a forwarder returns it when its domain has staged it.
// No circular waits, as for `staging`: take the smallest chunk that its source rank has not yet pulled. The chunk that used its places
// before has been pulled, so all its credits are granted or under way. Owners stage it before any later chunk; forwarders and the source
// rank need nothing else. This holds for a rank with one thread, too, because no rank blocks on one of these waits while it can do other
// work (host/combine.cpp).
MOECOMM_BOTH constexpr u64 receive_at(const WindowLayout& w, const Shape& s, i32 column, i32 token) {
    return w.receive_buffer + (static_cast<u64>(column) * s.ring_tokens + token % s.ring_tokens) * static_cast<u64>(s.receive_bytes);
}
MOECOMM_BOTH constexpr u64 returned_at(const WindowLayout& w, const Shape& s, i32 column, i32 token) {
    return w.returned + (static_cast<u64>(column) * s.ring_tokens + token % s.ring_tokens) * static_cast<u64>(s.staged_row_bytes);
}

}  // namespace moecomm
