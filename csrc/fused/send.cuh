// Store policy that sends rows of the second product to their source ranks.
#pragma once
#include "../device/grid.cuh"
#include "../gemm/policies.cuh"
#include "layer.cuh"

namespace moecomm {

struct SendRows {
    const LayerArgs& a;

    // Any thread: stores 8 columns of a row at its place in the receive buffer of the source rank.  Unordered until end().
    MOECOMM_FN void store(i32 row, i32 column, const uint4& values) const {
        const u64 to = reinterpret_cast<const u64*>(a.destinations)[row] + static_cast<u64>(column) * 2;
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
                     : "memory");
    }
    // Called by all threads of both math warpgroups, after the last tile; the loader warpgroup runs with fewer registers and takes no part.
    // Each thread's system fence covers its stores; the last block of the grid then signals all source ranks, unless the layer has failed.
    MOECOMM_FN void end() const {
        fence_system();
        barrier_sync(1 + kMathGroups, kMathGroups * kWarpgroup);
        if (threadIdx.x != kWarpgroup || !arrive_last(&own_state(a.ctx)->finished)) return;
        const u32 round = valid_round(a);
        if (round == 0) return;
        fence_system();  // one fence, then relaxed stores: a release store to each rank would take as long as the fence every time
        const u64 masked = own_mask(a.ctx).ranks[0];
        for (i32 p = 0; p < a.ctx.shape.ranks; ++p) {
            const i32 to = is_in(masked, p) ? a.ctx.rank : p, from = is_in(masked, p) ? p : a.ctx.rank;
            store_relaxed(reinterpret_cast<u64*>(a.ctx.peers[to] + received_at(a.ctx, from)), tag_signal(round));
        }
    }
};

}  // namespace moecomm
