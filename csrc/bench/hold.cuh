// Blocks that hold their SMs and do nothing: the baseline for a GEMM that runs concurrently with rounds.
#pragma once
#include "../protocol/deadline.h"

namespace moecomm::bench {

// moecomm_bench/overlap.py fills it.
struct HoldArgs {
    u64 ns;
};
static_assert(sizeof(HoldArgs) == 8, "as overlap.py packs it");

// Kernel body, called by all threads: sleep for `ns`.
MOECOMM_FN void hold(const HoldArgs& a) {
    const u64 end = now_ns() + a.ns;
    while (now_ns() < end) __nanosleep(1000);
}

}  // namespace moecomm::bench
