// Signal values.  A round's tag is the same on every rank because every rank makes the same calls in the same order.
#pragma once
#include "compiler.h"

namespace moecomm {

// Rounds are numbered from 1 and tagged 2 * number + 1.  Tags wrap by themselves, with the parity of the number kept, and no round has
// tag 0: that is what words hold before the first round, and how State says "none".  A word that no round has written for exactly 2^31
// rounds looks new again; each word that a round waits for is written by a peer in that round, so this takes a peer that is late by as
// much, which the deadline rules out, or a place that happened to lie unused for just so long.
constexpr u32 kTagStep = 2;  // from one round to the next
MOECOMM_BOTH constexpr u32 round_tag(u32 number) { return number * kTagStep + 1; }
MOECOMM_BOTH constexpr u32 round_number(u32 tag) { return tag / kTagStep; }  // modulo 2^31
MOECOMM_BOTH constexpr u32 round_parity(u32 tag) { return round_number(tag) & 1; }

// True if `seen` is the tag `wanted`, or a later one up to the round after `now`, the one this rank is in: no peer is further ahead, because
// it would need our notice of that round.  Tags of earlier rounds are not, however long ago they were left, nor is 0.
MOECOMM_BOTH constexpr bool has_reached(u32 seen, u32 wanted, u32 now) {
    return seen % kTagStep == wanted % kTagStep && seen - wanted <= now + kTagStep - wanted;
}

// "Chunk arrived": the tag of the round and the flat rows [first, first + count) the chunk filled at the receiver.
// Eight bytes, so that flag and range are one store.  count <= kMaxChunk, first < 2^23: Buffer refuses ranks * max_tokens above that.
constexpr u32 kCountBits = 9;
constexpr i64 kMaxFlatRows = 1ll << (32 - kCountBits);
static_assert(kMaxChunk < (1 << kCountBits), "a chunk's count must fit");

MOECOMM_BOTH constexpr u64 chunk_signal(u32 tag, i32 first, i32 count) {
    return (static_cast<u64>(tag) << 32) | (static_cast<u64>(static_cast<u32>(first)) << kCountBits) | static_cast<u32>(count);
}
MOECOMM_BOTH constexpr u32 signal_tag(u64 signal) { return static_cast<u32>(signal >> 32); }
MOECOMM_BOTH constexpr i32 signal_first(u64 signal) { return static_cast<i32>((signal & 0xffffffffull) >> kCountBits); }
MOECOMM_BOTH constexpr i32 signal_count(u64 signal) { return static_cast<i32>(signal & ((1u << kCountBits) - 1)); }

// "Rows reduced" and "drained" carry the tag alone, in the same place.
MOECOMM_BOTH constexpr u64 tag_signal(u32 tag) { return static_cast<u64>(tag) << 32; }

// A word of mail (notice.h), and "chunk pulled" with the number of the chunk: a tag and 32 bits.
MOECOMM_BOTH constexpr u64 word_signal(u32 tag, u32 word) { return tag_signal(tag) | word; }
MOECOMM_BOTH constexpr u32 signal_word(u64 signal) { return static_cast<u32>(signal); }

}  // namespace moecomm
