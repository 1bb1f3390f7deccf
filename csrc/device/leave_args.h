// Arguments of the kernel in leave.cuh, for its launch as well.
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {

struct LeaveArgs {
    u64 window, link;         // of this rank
    u64 signals;              // WindowLayout::signals
    u64 tagged_words, bytes;  // at this offset in every window; this rank's window holds the words to send
    u64 abort_here, abort_host, timeout_ns;
    i32 rank, ranks, domain_ranks, pad;
};

}  // namespace moecomm
