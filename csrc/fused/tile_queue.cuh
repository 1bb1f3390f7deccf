// The tile queue: tiles pass from a block's tile scheduler to the block's other roles, and positions from the first block of a cluster to
// the second.
#pragma once
#include "../gemm/ring.cuh"
#include "lagged.h"

namespace moecomm {

constexpr i32 kQueued = 2;  // tiles: one is multiplied while the next is loaded

struct QueuedTile {
    enum Product : i32 { none, first, second };

    Tile tile;
    Product product;  // none: no more tiles
    bool failed;      // a tile of the second product must not be sent
};

// Barriers of a queue slot: `full` completes when the scheduler has queued a tile, `stored` when all math warps have stored it, `empty`
// when the other roles are done with it too and the slot is free.  In a cluster of two blocks the first block takes a position for both,
// and `positioned` of the second completes when the position has arrived.  The word in `positions` is then free: the first block reuses a
// slot only after its tile was multiplied, and both blocks had loaded that tile.
template <GemmConfig c>
struct TileQueue {
    QueuedTile tiles[kQueued];
    u64 full[kQueued], stored[kQueued], empty[kQueued], positioned[kQueued];
    i32 positions[kQueued];
    LaggedWalk walk;  // state of the tile scheduler, here to save registers

    MOECOMM_FN void init() {
        for (i32 i = 0; i < kQueued; ++i) {
            barrier_init(&full[i], 1);
            barrier_init(&stored[i], kMathGroups * kWarpgroup / kWarp);
            barrier_init(&empty[i], c.scaled() ? 3 : 2);  // loader, completion warp and, with scales, scale loader
            barrier_init(&positioned[i], 1);
        }
    }
};

struct QueuePlace {
    i32 slot = 0;
    u32 phase = 0;

    MOECOMM_FN void step() {
        if (++slot == kQueued) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// Calls body(tile, slot) for all tiles of this block, in order.  Called by every thread of a role; each waits for `full` (no deadline: the
// scheduler, whose waits have one, always queues).  `body` must arrive at `stored` or `empty`.
template <GemmConfig c, class Body>
MOECOMM_FN void for_each_tile(TileQueue<c>& s, const Body& body) {
    for (QueuePlace at;; at.step()) {
        copy_wait(&s.full[at.slot], at.phase);
        if (s.tiles[at.slot].product == QueuedTile::none) return;
        body(s.tiles[at.slot], at);
    }
}

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

// Returns the cluster's next position.  Called by the tile scheduler of each block of the cluster, once the queue slot is free.  The second
// block waits for the first one's store (no deadline: it always comes).
template <GemmConfig c>
MOECOMM_FN i32 take_next_tile(TileQueue<c>& s, u32* next_tile, const QueuePlace& place) {
    if constexpr (c.cluster == 1) {
        return next_of(next_tile);
    } else {
        static_assert(c.cluster == 2, "one block to send it to");
        if (cluster_rank() == 0) {
            const i32 position = next_of(next_tile);
            send_word(&s.positions[place.slot], position, &s.positioned[place.slot], 1);
            return position;
        }
        expect_bytes(&s.positioned[place.slot], sizeof(i32));
        copy_wait(&s.positioned[place.slot], place.phase);
        return s.positions[place.slot];
    }
}

}  // namespace moecomm
