// Tiles on their way from the thread of a block that finds them to those that make them, and from the first block of a cluster to the
// other.
#pragma once
#include "../gemm/ring.cuh"
#include "lagged.h"

namespace moecomm {

constexpr i32 kQueued = 2;  // tiles: one is multiplied, the next one loaded

struct QueuedTile {
    enum Product : i32 { none, first, second };

    Tile tile;
    Product product;  // none: there are no more
    bool failed;      // of the second: not to be sent
};

// `full` completes a phase when a tile has been queued, `stored` when the warps that multiply are through with it, `empty` when all others
// are, too, and its place is free.  Where the cluster has two blocks, the first takes a position for both, and `positioned` of the second
// completes with it.  The place of that is then free as well: a tile that the first is through with was loaded by both.
template <GemmConfig c>
struct TileQueue {
    QueuedTile tiles[kQueued];
    u64 full[kQueued], stored[kQueued], empty[kQueued], positioned[kQueued];
    i32 positions[kQueued];
    LaggedWalk walk;  // of the tile scheduler: its registers are short

    MOECOMM_FN void init() {
        for (i32 i = 0; i < kQueued; ++i) {
            barrier_init(&full[i], 1);
            barrier_init(&stored[i], kMathGroups * kWarpgroup / kWarp);
            barrier_init(&empty[i], c.scaled() ? 3 : 2);  // the loader, the thread that completes tiles, the warp that loads scales
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

// Does body(tile, its place) with all tiles of this block.
template <GemmConfig c, class Body>
MOECOMM_FN void for_each_tile(TileQueue<c>& s, const Body& body) {
    for (QueuePlace at;; at.step()) {
        copy_wait(&s.full[at.slot], at.phase);
        if (s.tiles[at.slot].product == QueuedTile::none) return;
        body(s.tiles[at.slot], at);
    }
}

MOECOMM_FN i32 next_of(u32* counter) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return static_cast<i32>(before);
}
// A word to the same place in block `rank` of the cluster, whose bytes count at the barrier of that block.
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

// The cluster's next position, by one thread of each of its blocks, once this place is free.
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
