// Blocks that hold their SMs and do nothing.
#pragma once
#include "../protocol/deadline.h"

namespace moecomm::bench {

// moecomm_bench/decode.py fills it.
struct DelayArgs {
    u64 delays;  // u64[steps * layers], in nanoseconds
    u64 step;    // u64: number of the step, read when the kernel runs
    i64 layer, layers, steps;
};
static_assert(sizeof(DelayArgs) == 40, "as decode.py packs it");

// A rank's random delays: one block that does nothing for as long as a table says, another time in each replay of a graph. Kernel body,
// called by all threads of one block.
MOECOMM_FN void delay(const DelayArgs& a) {
    if (threadIdx.x != 0) return;
    const i64 step = static_cast<i64>(*reinterpret_cast<const u64*>(a.step) % static_cast<u64>(a.steps));
    const u64 end = now_ns() + reinterpret_cast<const u64*>(a.delays)[step * a.layers + a.layer];
    while (now_ns() < end) __nanosleep(200);
}

// moecomm_bench/overlap.py fills it.
struct HoldArgs {
    u64 ns;
};
static_assert(sizeof(HoldArgs) == 8, "as overlap.py packs it");

// The baseline for a GEMM that runs concurrently with rounds. Kernel body, called by all threads: sleep for `ns`.
MOECOMM_FN void hold(const HoldArgs& a) {
    const u64 end = now_ns() + a.ns;
    while (now_ns() < end) __nanosleep(1000);
}

}  // namespace moecomm::bench
