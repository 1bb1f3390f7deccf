// Arguments of the kernels in between_rounds.cuh, for their launches as well.
#pragma once
#include "../protocol/args.h"

namespace moecomm {

struct LeaveArgs {
    Context ctx;
    u64 tagged_words, bytes;  // at this offset in every window; this rank's window holds the words to send
    u64 members;              // bits of the ranks that take part
};

struct QuiesceArgs {
    Context ctx;
    u64 members;     // bits of the ranks that go on
    u64 agreement;   // its number, larger than those before
    u64 last_round;  // after which they go on
    u64 missing;     // u32[2], host-visible: bits of the ranks whose adds have not all arrived
};

struct SetPlacementArgs {
    u64 words, to;  // u32[count]: Placement and its table, in device memory
    i32 count, pad;
};

}  // namespace moecomm
