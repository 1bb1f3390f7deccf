// The tile queue: tiles pass from a block's tile scheduler to the block's other roles.
#pragma once
#include "../gemm/tile_counter.cuh"
#include "../gemm/widen.cuh"
#include "lagged.h"

namespace moecomm {

struct QueuedTile {
    enum Product : i32 { none, first, second };

    Tile tile;
    Product product;  // none: no more tiles
    bool failed;      // a tile of the second product must not be sent
};

// Barriers of a queue slot: `full` completes when the scheduler has queued a tile, `stored` when all math warps have stored it, `empty`
// when the other roles are done with it too and the slot is free.
template <GemmConfig c>
struct TileQueue {
    QueuedTile tiles[kQueued];
    u64 full[kQueued], stored[kQueued], empty[kQueued];
    Positions positions;
    LaggedWalk walk;  // state of the tile scheduler, here to save registers

    MOECOMM_FN void init() {
        for (i32 i = 0; i < kQueued; ++i) {
            barrier_init(&full[i], 1);
            barrier_init(&stored[i], kMathGroups * kWarpgroup / kWarp);
            // Loader, completion warp and, with scales, scale loader; widening warps.
            barrier_init(&empty[i], (c.scaled() ? 3 : 2) + c.widening_groups() * kWideningWarps);
        }
        positions.init();
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

}  // namespace moecomm
