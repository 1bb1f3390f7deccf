// Packets (kernels): the rows of few tokens travel in lines of 128 bytes, as in NCCL's LL128 protocol. Each line ends in the tag of the
// round and is complete when its tag is there. So a row needs no flag after it, and needs no final place before it is sent: the sender's
// token alone determines the packet's place, before any count is known. The receiver unpacks it.
//
// A reader must never see part of a line. Eight lanes store a line in one store instruction of their warp, which NVLink carries as a unit;
// LL128 rests on the same property. Tags are at the same offsets whatever a packet carries, so content never looks like a tag.
#pragma once
#include "signal.h"

namespace moecomm {

constexpr i32 kLineBytes = 128, kLineWords = 15;  // 64-bit words of content in a line
constexpr i32 kPacketLines = 16;                  // at most in a packet: four stores of a warp
constexpr i32 kPacketTokens = 512;                // at most, of a rank that sends packets
constexpr i32 kWantedWords = kPacketTokens / 32;  // tagged words with one bit for each token

MOECOMM_BOTH constexpr u64 line_tag(u32 tag) { return word_signal(tag, ~tag); }

// Metadata of a row in its packets (Packets::kSharesEntries), for each k: the expert, the entry's index among the sender's entries of that
// expert, and the weight.
MOECOMM_BOTH constexpr u64 packed_entry(i32 expert, i32 nth, u32 weight_bits) {
    return (static_cast<u64>(static_cast<u32>(expert) << 16 | static_cast<u32>(nth)) << 32) | weight_bits;
}
constexpr u32 kNoEntry = 0xffffffffu;  // upper half of an entry without expert
constexpr i32 kMostPacketEntries = 4096;
static_assert(kMostPacketEntries <= 1 << 16, "a place fits 16 bits");

}  // namespace moecomm
