// State of a rank after Buffer.mask() or Buffer.unmask().
#pragma once
#include "domains.h"

namespace moecomm {

// The words at WindowLayout::state.
struct Resumed {
    State state;
    Mask mask;
};
static_assert(sizeof(Resumed) == sizeof(State) + sizeof(Mask), "the mask lies behind the state");

// Go on after `round` without the ranks of `mask`, u64[kMaskWords]. Nobody reads rows that earlier rounds have staged, no dispatch has
// begun, and no block of a kernel counts.
MOECOMM_BOTH Resumed resumed(u32 round, const u64* mask) {
    Resumed r{};
    r.state.round = round;
    r.mask.since = round_tag(round + 1);
    for (i32 word = 0; word < kMaskWords; ++word) r.mask.ranks[word] = mask[word];
    return r;
}

// The word of `signals` that goes with it: forwarders, and so the writers of signals, may be others than before.
MOECOMM_BOTH constexpr u64 resumed_signal(i32 ranks, u32 round, u64 which) {
    return which < static_cast<u64>(ranks) ? tagged_words_value(round_tag(round)) : 0;
}

}  // namespace moecomm
