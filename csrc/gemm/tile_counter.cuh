// Tiles whose order is dynamic: clusters take the next one from a counter of the whole grid.
//
// Tiles then begin in their order, so neighbors, which read the same weights, begin together.  Where each cluster takes every n-th tile
// instead, one with shorter tiles runs ahead.  The lead grows, and weights are read from memory again (docs/maintainers/decisions.md).
#pragma once
#include "ring.cuh"

namespace moecomm {

constexpr i32 kQueued = 2;  // tiles: one is multiplied while the next is loaded

using QueuePlace = Place<kQueued>;

// Positions that the first block of a pair sends to the second; `arrived` completes when a word has been written.  The first block writes a
// word again only after its own roles are done with that tile.  They need the second block's half of x, so the second block has read it.
struct Positions {
    u64 arrived[kQueued];
    i32 words[kQueued];

    MOECOMM_FN void init() {
        for (u64& barrier : arrived) barrier_init(&barrier, 1);
    }
};

// Takes the next value of a counter of the whole grid.  One thread; relaxed.
MOECOMM_FN i32 next_of(u32* counter) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return static_cast<i32>(before);
}
// Stores a word at the same place in block `rank` of the cluster; its bytes count at that block's barrier.  One thread, asynchronous.
MOECOMM_FN void send_word(i32* to, i32 value, u64* barrier, i32 rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 there, counts;\n\t"
        "mapa.shared::cluster.u32 there, %0, %3;\n\t"
        "mapa.shared::cluster.u32 counts, %2, %3;\n\t"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [counts];\n\t"
        "}" ::"r"(shared_address(to)),
        "r"(value), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}

// Returns the cluster's next position.  Called by one thread of each block of the cluster, once the queue slot is free.  The second block
// waits for the first one's store (no deadline: it always comes).
template <GemmConfig c>
MOECOMM_FN i32 take_position(Positions& s, u32* counter, const QueuePlace& place) {
    if constexpr (c.cluster == 1) {
        return next_of(counter);
    } else {
        static_assert(c.cluster == 2, "one block to send it to");
        if (cluster_rank() == 0) {
            const i32 position = next_of(counter);
            send_word(&s.words[place.slot], position, &s.arrived[place.slot], 1);
            return position;
        }
        expect_bytes(&s.arrived[place.slot], sizeof(i32));
        copy_wait(&s.arrived[place.slot], place.phase);
        return s.words[place.slot];
    }
}

// The queue from the tile scheduler of a block to its other roles: the loader, the warp that loads scales into slots, if there is one, the
// warps that widen weights, if there are any, and the warps that multiply.  `full` completes when a tile has been queued, `empty` when all
// roles are done with it.
template <GemmConfig c>
struct SharedQueue {
    Positions positions;
    u64 full[kQueued], empty[kQueued];

    MOECOMM_FN void init() {
        positions.init();
        for (i32 i = 0; i < kQueued; ++i) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], 1 + (c.has_slot_scales() ? 1 : 0) + (c.threads() - kWarpgroup) / kWarp);
        }
    }
};
// With a dynamic order it holds indices of tiles.  Where weights are widened it holds tiles, also in a static order: no other role has
// registers for a TileWalk.  Else it is empty.
template <GemmConfig c, bool = c.dynamic, bool = c.widens()>
struct IndexQueue {
    MOECOMM_FN void init() {}
};
template <GemmConfig c>
struct IndexQueue<c, true, false> : SharedQueue<c> {
    i32 indices[kQueued];
};
template <GemmConfig c, bool dynamic>
struct IndexQueue<c, dynamic, true> : SharedQueue<c> {
    Tile tiles[kQueued];  // no rows: there are no more
};

}  // namespace moecomm
