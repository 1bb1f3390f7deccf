// Values of signals. A round has the same tag on every rank, because every rank makes the same calls in the same order.
#pragma once
#include "compiler.h"

namespace moecomm {

// Rounds are numbered from 1 and tagged 2 * number + 1. Tags wrap around with the parity of the number kept. No round has tag 0, which
// words hold before the first round, and which means "none" in State. A word that no round has written for exactly 2^31 rounds looks new
// again. Each word that a round waits for is written by a peer in that round, so this takes a peer that is 2^31 rounds behind, which the
// deadline rules out, or a place that stayed unused for exactly so long.
constexpr u32 kTagStep = 2;  // from one round to the next
MOECOMM_BOTH constexpr u32 round_tag(u32 number) { return number * kTagStep + 1; }
MOECOMM_BOTH constexpr u32 round_number(u32 tag) { return tag / kTagStep; }  // modulo 2^31
MOECOMM_BOTH constexpr u32 round_parity(u32 tag) { return round_number(tag) & 1; }

// True if `seen` is the tag `wanted` or a later one, up to the round after `now`, the round of this rank. No peer is further ahead, because
// that would need this rank's header of the next round. False for tags of earlier rounds, however old, and for 0.
MOECOMM_BOTH constexpr bool has_reached(u32 seen, u32 wanted, u32 now) {
    return seen % kTagStep == wanted % kTagStep && seen - wanted <= now + kTagStep - wanted;
}

// Value of `arrived`: the tag of the round and the flat rows [first, first + count) that the chunk filled at the receiver. Eight bytes, so
// that one store writes flag and range. count <= kMaxChunk, first < 2^23: Buffer refuses ranks * max_tokens above that.
constexpr u32 kCountBits = 9;
constexpr i64 kMaxFlatRows = 1ll << (32 - kCountBits);
static_assert(kMaxChunk < (1 << kCountBits), "a chunk's count must fit");

MOECOMM_BOTH constexpr u64 chunk_signal(u32 tag, i32 first, i32 count) {
    return (static_cast<u64>(tag) << 32) | (static_cast<u64>(static_cast<u32>(first)) << kCountBits) | static_cast<u32>(count);
}
MOECOMM_BOTH constexpr u32 signal_tag(u64 signal) { return static_cast<u32>(signal >> 32); }
MOECOMM_BOTH constexpr i32 signal_first(u64 signal) { return static_cast<i32>((signal & 0xffffffffull) >> kCountBits); }
MOECOMM_BOTH constexpr i32 signal_count(u64 signal) { return static_cast<i32>(signal & ((1u << kCountBits) - 1)); }

// Value of `reduced` and `drained`: the tag alone, in the same place.
MOECOMM_BOTH constexpr u64 tag_signal(u32 tag) { return static_cast<u64>(tag) << 32; }

// A tagged word (round_header.h), or a credit with the number of its chunk: a tag and 32 bits.
MOECOMM_BOTH constexpr u64 word_signal(u32 tag, u32 word) { return tag_signal(tag) | word; }
MOECOMM_BOTH constexpr u32 signal_word(u64 signal) { return static_cast<u32>(signal); }

}  // namespace moecomm
