// Copies of experts for a round, from the Windows of the ranks that own them (moecomm/weights/copies.py).
#pragma once
#include "../device/launch.cuh"
#include "../protocol/order.h"
#include "call_args.h"

namespace moecomm {

// Copy `count` values to memory that nothing else touches. By all threads of all blocks, each some, with several loads in flight.
template <class T>
MOECOMM_FN void copy_by_grid(u64 to, u64 from, u64 count) {
    constexpr i32 unrolled = 8;
    const u64 stride = static_cast<u64>(gridDim.x) * blockDim.x;
    for (u64 first = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; first < count; first += unrolled * stride) {
        T values[unrolled];
#pragma unroll
        for (i32 i = 0; i < unrolled; ++i)
            if (first + i * stride < count) values[i] = reinterpret_cast<const T*>(from)[first + i * stride];
#pragma unroll
        for (i32 i = 0; i < unrolled; ++i)
            if (first + i * stride < count) reinterpret_cast<T*>(to)[first + i * stride] = values[i];
    }
}

// Fill the slots of this rank that are copies. Called by all threads of any number of blocks; cannot fail, and waits for no rank. Begins
// when the earlier kernels of the stream have ended. Among them the one that has chosen the copies has seen the counts of the owner, which
// posted them behind all that it had written; its fence and this one order the reads here.
MOECOMM_FN void copy_experts(const CopyArgs& a) {
    await_earlier_kernels();
    fence_system();
    const i32* const copied = reinterpret_cast<const i32*>(a.copied) + a.rank * a.slots;
    for (i32 slot = 0; slot < a.slots; ++slot) {
        const i32 source = copied[slot];
        if (source < 0) continue;
        for (i32 nth = 0; nth < a.tensors; ++nth) {
            const u64* const peers = reinterpret_cast<const u64*>(a.peers[nth]);
            const u64 nbytes = a.nbytes[nth], at = a.offsets[nth];
            const u64 from = peers[source / a.slots] + at + static_cast<u64>(source % a.slots) * nbytes;
            const u64 to = peers[a.rank] + at + static_cast<u64>(slot) * nbytes;
            if ((from | to | nbytes) % sizeof(ulonglong2) == 0)
                copy_by_grid<ulonglong2>(to, from, nbytes / sizeof(ulonglong2));
            else
                copy_by_grid<u8>(to, from, nbytes);
        }
    }
}

}  // namespace moecomm
