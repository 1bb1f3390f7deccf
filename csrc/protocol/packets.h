// Packets: how the rows of few tokens travel (kernels).  A packet is a piece of a row in lines of 128 bytes, each of which ends in the tag
// of the round: a line is whole when its tag is there, so that a row needs neither a flag behind it nor a place of its own before it is
// sent.  It is sent to a place that only the sender's token decides, before anything is known of the others, and unpacked by the receiver.
//
// A line must not be seen in part: the eight lanes that store it do so in one store of their warp, which NVLink carries whole; NCCL's LL128
// protocol rests on the same.  Tags lie at the same places whatever a packet carries, so that content never looks like one.
#pragma once
#include "signal.h"

namespace moecomm {

constexpr i32 kLineBytes = 128, kLineWords = 15;  // 64-bit words of content in a line
constexpr i32 kPacketLines = 16;                  // at most: four stores of a warp
constexpr i32 kPacketTokens = 512;                // of a rank that sends packets, at most
constexpr i32 kWantedWords = kPacketTokens / 32;  // of mail: a bit a token

MOECOMM_BOTH constexpr u64 line_tag(u32 tag) { return word_signal(tag, ~tag); }

// What stands beside a row in a packet, for each k: the expert, the entry's place among the sender's entries of that expert, the weight.
MOECOMM_BOTH constexpr u64 packed_entry(i32 expert, i32 nth, u32 weight_bits) {
    return (static_cast<u64>(static_cast<u32>(expert) << 16 | static_cast<u32>(nth)) << 32) | weight_bits;
}
constexpr u32 kNoEntry = 0xffffffffu;  // the upper half where there is no expert
constexpr i32 kMostPacketEntries = 4096;
static_assert(kMostPacketEntries <= 1 << 16, "a place fits 16 bits");

}  // namespace moecomm
