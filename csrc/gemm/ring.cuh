// The ring of slots between the thread that loads and the warpgroups that multiply: a step of 128 bytes of their rows each.
#pragma once
#include "../device/copy.cuh"
#include "config.cuh"

namespace moecomm {

template <GemmConfig c>
struct Ring {
    u8 w[c.stages][c.weight_bytes()];
    u8 x[c.stages][c.row_bytes()];
    static_assert(c.weight_bytes() % 1024 == 0, "atoms of the swizzle");
};

// A barrier completes a phase when a slot has been filled, another when it has been emptied.
template <GemmConfig c>
struct RingBarriers {
    u64 full[c.stages];   // an arrival of the loader, and bytes; one of each lane that loads scales
    u64 empty[c.stages];  // of each warp that multiplies, in all blocks of the cluster: any of them loads into this slot

    MOECOMM_FN void init() {
        for (i32 s = 0; s < c.stages; ++s) {
            barrier_init(&full[s], c.scaled() ? 1 + kWarp : 1);
            barrier_init(&empty[s], c.cluster * kMathGroups * kWarpgroup / kWarp);
        }
    }
};

// This warp is through with a slot: any block of the cluster may fill its part of it.
template <GemmConfig c>
MOECOMM_FN void release_slot(RingBarriers<c>& barriers, i32 slot) {
    if constexpr (c.cluster == 1) {
        if (lane_id() == 0) arrive(&barriers.empty[slot]);
    } else {
        if (lane_id() < c.cluster) arrive_at(&barriers.empty[slot], lane_id());
    }
}

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
