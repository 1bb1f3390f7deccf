// The ring of slots between the thread that loads and the warpgroups that multiply: a step of kDepth columns of w and x each.
#pragma once
#include "config.cuh"

namespace moecomm {

constexpr i32 kWarpgroup = 128, kMathGroups = 2;
constexpr i32 kWeightBytes = kBlockColumns * kSlotRowBytes;  // of w, in a slot

template <GemmConfig c>
struct Ring {
    u8 w[c.stages][kWeightBytes];
    u8 x[c.stages][c.row_bytes()];
};
static_assert(kWeightBytes % 1024 == 0, "atoms of the swizzle");

// A barrier completes a phase when a slot has been filled, another when it has been emptied.
template <GemmConfig c>
struct RingBarriers {
    u64 full[c.stages];   // an arrival of the loader, and bytes
    u64 empty[c.stages];  // of each warp that multiplies, in all blocks of the cluster: any of them loads into this slot

    MOECOMM_FN void init() {
        for (i32 s = 0; s < c.stages; ++s) {
            barrier_init(&full[s], 1);
            barrier_init(&empty[s], c.cluster * kMathGroups * kWarpgroup / kWarp);
        }
    }
};

// Where somebody is in the ring.
template <GemmConfig c>
struct RingPlace {
    i32 slot = 0;
    u32 phase = 0;

    MOECOMM_FN void step() {
        if (++slot == c.stages) {
            slot = 0;
            phase ^= 1;
        }
    }
};

}  // namespace moecomm
