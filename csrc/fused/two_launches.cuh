// The two launches of a layer: rows are fetched while the first GEMM has begun, and go home as the second makes them.
#pragma once
#include "fetch.cuh"
#include "gemm.cuh"
#include "send.cuh"

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
        fetch_rows<r, c.shared_bytes>(args.layer, args.gemm.helpers, 0);
        if (blockIdx.x == 0 && threadIdx.x == 0) note_failure(args.layer);
    }
    run_gemm<c>(args.gemm, RowsAreFetched<r>{args.layer}, store_here<c>(args.gemm));
}

// What our experts make of these.
template <GemmConfig c>
MOECOMM_FN void multiply_and_send(const LayerGemmArgs& args) {
    await_earlier_kernels();
    if (!layer_goes_on(args.layer)) return;  // all blocks alike; homes of a void round wait for nothing
    run_gemm<c>(args.gemm, RowsAreHere{}, StoreAtHome{args.layer});
}

}  // namespace moecomm
