// The ring of slots between the loaders and the warpgroups that multiply.  A slot holds 128 bytes of each row of the tile of w and x.
#pragma once
#include "../device/lanes.cuh"
#include "config.cuh"

namespace moecomm {

template <GemmConfig c, bool = c.widens()>
struct Ring {
    u8 w[c.stages][c.weight_bytes()];
    u8 x[c.stages][c.row_bytes()];
    static_assert(c.weight_bytes() % 1024 == 0, "atoms of the swizzle");
};
// Packed weights arrive in a ring of their own, from which widening warpgroups write w.  It is here because tensor loads need aligned
// memory.
template <GemmConfig c>
struct Ring<c, true> {
    u8 w[c.stages][c.weight_bytes()];
    u8 x[c.stages][c.row_bytes()];
    u8 packed[c.packed_stages][c.packed_bytes()];
    static_assert(c.weight_bytes() % 1024 == 0 && c.packed_bytes() % 128 == 0, "atoms of the swizzle, and aligned boxes");
};

template <GemmConfig c>
struct RingBarriers {
    // Completes when the slot is filled: bytes and one arrival of the thread that loads rows, one of each lane that loads scales, and one
    // of each warp of the widening warpgroup whose step it is.
    u64 full[c.stages];
    // Completes when the slot is free: one arrival of each multiplying warp of all blocks of the cluster, because every block of the
    // cluster loads into this slot.
    u64 empty[c.stages];

    // One thread; barrier_init_done() and a block or cluster barrier must follow.
    MOECOMM_FN void init() {
        for (i32 s = 0; s < c.stages; ++s) {
            barrier_init(&full[s], (c.has_slot_scales() ? 1 + kWarp : 1) + (c.widens() ? kWarpgroup / kWarp : 0));
            barrier_init(&empty[s], c.cluster * kMathGroups * kWarpgroup / kWarp);
        }
    }
};

// Releases a slot to the loaders of all blocks of the cluster.  Called by a whole warp that multiplies, after its reads of the slot
// (wgmma_wait for tensor cores, __syncwarp for loads by lanes).  Cannot fail.
template <GemmConfig c>
MOECOMM_FN void release_slot(RingBarriers<c>& barriers, i32 slot) {
    if constexpr (c.cluster == 1) {
        if (lane_id() == 0) arrive(&barriers.empty[slot]);
    } else {
        if (lane_id() < c.cluster) arrive_at(&barriers.empty[slot], lane_id());
    }
}

// A role's position in a ring or a queue: slot and barrier parity.  The two forms of step() do the same; each keeps the machine code that
// the kernels with it were measured with.
template <i32 slots>
struct Place {
    i32 slot = 0;
    u32 phase = 0;

    MOECOMM_FN void step() {
        if constexpr (slots > 2) {
            slot = slot == slots - 1 ? 0 : slot + 1;
            phase ^= slot == 0 ? 1 : 0;
        } else if (++slot == slots) {
            slot = 0;
            phase ^= 1;
        }
    }
};
template <GemmConfig c>
using RingPlace = Place<c.stages>;

}  // namespace moecomm
