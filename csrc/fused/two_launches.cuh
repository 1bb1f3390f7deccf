// The two launches of a layer: rows are fetched while the first GEMM has begun, and go home as the second makes them.
#pragma once
#include "../device/grid.cuh"
#include "fetch.cuh"
#include "gemm.cuh"

namespace moecomm {

struct LayerGemmArgs {
    GemmArgs gemm;
    LayerArgs layer;
};

// out[r] = silu(gate) * up of the rows that our experts get, of e4m3 cast once more.  A launch of whole clusters, args.gemm.helpers of
// whose blocks fetch first.
template <GemmConfig c, RowConfig r>
MOECOMM_FN void fetch_and_multiply(const LayerGemmArgs& args) {
    static_assert(r.type == c.type, "rows are multiplied as they come");
    if (static_cast<i32>(blockIdx.x) < args.gemm.helpers) {
        await_earlier_kernels();
        fetch_rows<r, c.shared_bytes>(args.layer, args.gemm.helpers);
        if (blockIdx.x == 0 && threadIdx.x == 0) note_failure(args.layer);
    }
    run_gemm<c>(args.gemm, RowsAreFetched{args.layer}, store_here<c>(args.gemm));
}

// Rows of the product, each to its place at its home; the last block says so to everybody.
struct StoreAtHome {
    const LayerArgs& a;

    MOECOMM_FN void store(i32 row, i32 column, const uint4& values) const {
        const u64 to = reinterpret_cast<const u64*>(a.homes)[row] + static_cast<u64>(column) * 2;
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
                     : "memory");
    }
    // The threads that load have other registers, and no part in this.
    MOECOMM_FN void end() const {
        fence_system();
        meet(1 + kMathGroups, kMathGroups * kWarpgroup);
        if (threadIdx.x != kWarpgroup || !arrive_last(&own_state(a.ctx)->finished)) return;
        const u64 signal = tag_signal(layer_round(a));
        for (i32 p = 0; p < a.ctx.shape.ranks; ++p)
            store_release(reinterpret_cast<u64*>(a.ctx.peers[p] + landed_at(a.ctx, a.ctx.rank)), signal);
    }
};

// What our experts make of these.
template <GemmConfig c>
MOECOMM_FN void multiply_and_send(const LayerGemmArgs& args) {
    await_earlier_kernels();
    if (!layer_goes_on(args.layer)) return;  // all blocks alike; homes of a void round wait for nothing
    run_gemm<c>(args.gemm, RowsAreHere{}, StoreAtHome{args.layer});
}

}  // namespace moecomm
