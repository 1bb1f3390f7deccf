// Placement: the slots that hold the experts that callers name. Each rank has as many slots, and Shape::slots counts those of all ranks. An
// expert may have several slots (replicas), or none (its ranks are lost or masked), and a slot may be empty.
//
// The table lies in each rank's window, so that it changes between replays of a captured graph. Only this rank reads it: a choice of
// replicas is that of the source rank. It changes between two of this rank's rounds, in their order: on CPU ranks the thread that makes
// them writes it, on GPUs a kernel in their stream (device/between_rounds.cuh). Ranks make the same calls in the same order, so all change
// between the same two rounds, each in its own time. A rank that does not shows in the header of its next dispatch.
#pragma once
#include "layout.h"

namespace moecomm {

struct Placement {
    u32 generation;  // grows with each change
    i32 experts;     // named_experts(Shape)
    u32 digest;      // of the placement, which is the same on all ranks, unlike the table
    u32 empty;       // where the list of empty slots begins, in words
};
static_assert(sizeof(Placement) == kPlacementBytes, "window_layout leaves room for it");
// Behind Placement, u32[placement_words()]: for each expert, the number of its slots here, and above it the slot if there is one, else
// where its list begins, in words; then the lists; then how many slots hold no expert, and these slots, ascending. An expert without a slot
// is not there: its entries are like those of id -1.
constexpr u32 kMostReplicas = 1 << 12, kMostSlots = 1 << 19;  // fewer replicas of an expert, and slots in all
// RoundHeader::route_round of a dispatch of ids: this bit, the digest, and the generation. Ranks that differ in it make an invalid round.
constexpr i64 kGeneration = 1ll << 62;
constexpr i32 kDigestBits = 30;
MOECOMM_FN i64 generation_of(const Placement& placement) {
    return kGeneration | static_cast<i64>(placement.digest) << 32 | placement.generation;
}

MOECOMM_BOTH constexpr u64 placement_at(const WindowLayout& w) { return mask_at(w) + sizeof(Mask); }

// Values of Context::placed. With kByTable an entry's slot is a lookup. With kBalanced a step ahead of the dispatch chooses the slots of
// all entries, by what all ranks send to each expert in this round (dispatch/choose.cuh, host/choose.cpp). Ranks need not agree on these
// slots: the dispatch counts what was chosen. With kReplicated, which a call asks for in a Buffer with kBalanced, that step first chooses
// experts to copy to empty slots for this round. All ranks choose the same: they have the same counts, placement and masks. The window's
// heap then begins with four tables.
//
// i32[max_tokens][topk]: the slot of each entry of this round, as slot_of() says. Where the step does not end, because a peer makes another
// call, -1: the dispatch finds out by the headers, and must not judge the slots of an earlier round.
//
// i32[slots], with kReplicated: for each slot of all ranks, the slot of which it is a copy in this round; -1: of none.
//
// u64[2][ranks][named_experts]: word_signal, by round parity and sender: its entries for each expert. Two parities are enough: a peer sends
// those of round n + 2 when its round n + 1 has ended. That one has seen this rank's words of round n + 1, which this rank sent after it
// had read those of round n.
//
// u64[kChoosingBlocks][named_experts]: word_signal: scratch of kernels, with the entries of each block.
constexpr i32 kByTable = 1, kBalanced = 2, kReplicated = 3;
MOECOMM_BOTH constexpr bool is_balanced(i32 placed) { return placed >= kBalanced; }
constexpr i32 kChoosingBlocks = 16;
// Blocks of the kernel that chooses the slots of so many entries.
MOECOMM_BOTH constexpr i32 choosing_blocks(i64 entries) {
    const i64 blocks = ceil_div<i64>(entries, 4096);
    return static_cast<i32>(blocks < 1 ? 1 : blocks > kChoosingBlocks ? kChoosingBlocks : blocks);
}
constexpr i32 kSharePasses = 4;  // by moecomm/base/replicas.py, as the next one
constexpr i32 kCopyPart = 32;    // a copy takes at least such a part of the mean rows off the busiest rank
MOECOMM_BOTH constexpr u64 chosen_at(const WindowLayout& w) { return w.heap; }
MOECOMM_BOTH constexpr u64 copied_at(const WindowLayout& w, const Shape& s) {
    return chosen_at(w) + static_cast<u64>(s.max_tokens) * static_cast<u64>(s.topk) * sizeof(i32);
}
// The nth of the tables by named expert, which lie one after the other: of both parities and all senders, then of all blocks.
MOECOMM_BOTH constexpr u64 choice_table_at(const WindowLayout& w, const Shape& s, u64 nth) {
    const u64 first = align_up<u64>(copied_at(w, s) + s.slots * sizeof(i32), sizeof(u64));
    return first + nth * static_cast<u64>(named_experts(s)) * sizeof(u64);
}
MOECOMM_BOTH constexpr u64 choice_words_at(const WindowLayout& w, const Shape& s, u32 tag, i32 from) {
    return choice_table_at(w, s, round_parity(tag) * static_cast<u64>(s.ranks) + from);
}
MOECOMM_BOTH constexpr u64 choice_counting_at(const WindowLayout& w, const Shape& s, i32 block) {
    return choice_table_at(w, s, 2ull * s.ranks + block);
}
MOECOMM_BOTH constexpr u64 choice_bytes(const Shape& s) { return choice_counting_at({}, s, kChoosingBlocks); }

// Returns the slot of an entry (token * topk + k) by the table; -1: none; Shape::slots, which no slot is: the id is invalid. `first_token`:
// see Route.
MOECOMM_FN i64 slot_of(const Placement& placement, i64 id, i64 entry, i32 topk, i32 slots, i32 first_token) {
    if (id == -1) return -1;
    if (id < 0 || id >= placement.experts) return slots;
    const u32* const words = reinterpret_cast<const u32*>(&placement + 1);
    const u32 word = words[id], count = word % kMostReplicas, at = word / kMostReplicas;
    if (count <= 1) return count == 1 ? static_cast<i64>(at) : -1;
    // Of token and k: `entry` would pair each k with few replicas.
    const u32 turn = static_cast<u32>(first_token + entry / topk + entry % topk);
    return words[at + turn % count];
}

}  // namespace moecomm
