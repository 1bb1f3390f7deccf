// Windows in kernels: groups of threads, and puts from shared memory. Blocks have one dimension.
#pragma once
#include "../device/bulk.cuh"
#include "window.h"

namespace moecomm {

// All 32 lanes of a warp.
struct CoopWarp {
    MOECOMM_FN i32 index() const { return static_cast<i32>(threadIdx.x % kWarp); }
    MOECOMM_FN i32 size() const { return kWarp; }
    MOECOMM_FN void sync() const { __syncwarp(); }
    MOECOMM_FN bool any(bool here) const { return __any_sync(kAllLanes, here); }
};

// All threads of a block.
struct CoopBlock {
    MOECOMM_FN i32 index() const { return static_cast<i32>(threadIdx.x); }
    MOECOMM_FN i32 size() const { return static_cast<i32>(blockDim.x); }
    MOECOMM_FN void sync() const { __syncthreads(); }
    MOECOMM_FN bool any(bool here) const { return __syncthreads_or(here); }
};

// Copy `bytes` from shared memory, as all threads of `coop` see it, to byte `to` of a rank's memory by TMA. Addresses and sizes are
// multiples of 16. Any Coop; cannot fail. The copy has happened after put_bulk_wait(), not before; until then the shared memory must stay.
template <class Coop>
MOECOMM_FN void put_bulk(Coop coop, const Window& window, i32 rank, u64 to, const void* shared, i32 bytes) {
    fence_async_shared();
    coop.sync();
    if (coop.index() != 0) return;
    bulk_store(window.peer<>(rank, to), shared, bytes);
    bulk_commit();
}
// Wait until all put_bulk() of the group have been written. Any Coop; cannot fail, and needs no deadline: an issued copy ends. A signal
// that one of its threads raises afterwards covers the bytes.
template <class Coop>
MOECOMM_FN void put_bulk_wait(Coop coop) {
    if (coop.index() == 0) bulk_wait<0>();
    coop.sync();
}

}  // namespace moecomm
