// The two launches of a layer: rows are fetched while the first GEMM has begun, and go home as the second makes them.
#pragma once
#include "../gemm/gemm.cuh"
#include "fetch.cuh"
#include "send.cuh"

namespace moecomm {

struct LayerGemmArgs {
    GemmArgs gemm;
    LayerArgs layer;
};

template <GemmConfig c>
struct FetchingShared {
    GemmShared<c> gemm;
    FetchShared fetch;
};

// out[r] = silu(gate) * up of the rows that our experts get, of e4m3 cast once more.  A launch of whole clusters, args.gemm.helpers of
// whose blocks fetch first.
template <GemmConfig c, RowConfig r>
MOECOMM_FN void fetch_and_multiply(const LayerGemmArgs& args) {
    static_assert(r.type == c.type, "rows are multiplied as they come");
    if (static_cast<i32>(blockIdx.x) < args.gemm.helpers) {
        extern __shared__ __align__(1024) u8 memory[];
        auto& s = *reinterpret_cast<FetchingShared<c>*>(memory);
        static_assert(sizeof(s) <= c.shared_bytes, "two_launches.py bounds it");
        if (threadIdx.x == 0) {
            s.fetch.init();
            barrier_init_done();
        }
        __syncthreads();
        await_earlier_kernels();
        fetch_rows<r, GemmShared<c>::room()>(args.layer, s.fetch, memory, args.gemm.helpers, 0);
        if (blockIdx.x == 0 && threadIdx.x == 0) note_failure(args.layer);
    }
    run_gemm<c>(args.gemm, RowsAreFetched<r>{args.layer}, store_here<c>(args.gemm));
}

// What our experts make of these.
template <GemmConfig c>
MOECOMM_FN void multiply_and_send(const LayerGemmArgs& args) {
    await_earlier_kernels();
    if (round_that_goes_on(args.layer) == 0) return;  // all blocks alike; homes of a void round wait for nothing
    run_gemm<c>(args.gemm, RowsAreHere{}, StoreAtSourceRank{args.layer});
}

}  // namespace moecomm
