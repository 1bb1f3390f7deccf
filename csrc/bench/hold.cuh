// Blocks that hold their multiprocessors and do nothing: what a GEMM beside rounds is held against.
#pragma once
#include "../protocol/deadline.h"

namespace moecomm::bench {

// moecomm/bench/overlap.py fills it in.
struct HoldArgs {
    u64 ns;
};
static_assert(sizeof(HoldArgs) == 8, "as overlap.py packs it");

MOECOMM_FN void hold(const HoldArgs& a) {
    const u64 end = now_ns() + a.ns;
    while (now_ns() < end) __nanosleep(1000);
}

}  // namespace moecomm::bench
