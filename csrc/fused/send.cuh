// What experts have made, on its way to the source ranks.
#pragma once
#include "../device/grid.cuh"
#include "../gemm/policies.cuh"
#include "layer.cuh"

namespace moecomm {

// Rows of the product, each to its place in the receive buffer of its source rank; the last block says so to everybody.
struct SendRows {
    const LayerArgs& a;

    MOECOMM_FN void store(i32 row, i32 column, const uint4& values) const {
        const u64 to = reinterpret_cast<const u64*>(a.destinations)[row] + static_cast<u64>(column) * 2;
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
                     : "memory");
    }
    // The threads that load have other registers, and no part in this.
    MOECOMM_FN void end() const {
        fence_system();
        barrier_sync(1 + kMathGroups, kMathGroups * kWarpgroup);
        if (threadIdx.x != kWarpgroup || !arrive_last(&own_state(a.ctx)->finished)) return;
        const u32 round = round_that_goes_on(a);
        if (round == 0) return;
        fence_system();  // once: a release to each rank takes as long as this
        for (i32 p = 0; p < a.ctx.shape.ranks; ++p)
            store_relaxed(reinterpret_cast<u64*>(a.ctx.peers[p] + received_at(a.ctx, a.ctx.rank)), tag_signal(round));
    }
};

}  // namespace moecomm
