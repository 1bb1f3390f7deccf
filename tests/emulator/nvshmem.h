// The functions of shims.h that Nvshmem calls, over a network that delays and reorders: puts and adds of a rank are not ordered with each
// other, and only a fence or a quiet orders them.
#pragma once
#include "cuda.h"

namespace moecomm {

inline int emulated_rank() { return emulator::emulator_thread->of_block->launch->rank; }

inline void moecomm_nvshmem_put_warp(void* to, const void* from, u64 bytes, i32 peer) {
    __syncwarp();
    const int rank = emulated_rank();
    if (threadIdx.x % 32 == 0) emulator::emulator_put(rank, peer, 0, emulator::emulator_address(rank, peer, to), from, bytes);
    __syncwarp();
}
inline void moecomm_nvshmem_signal_add(u64* signal, u64 add, i32 peer) {
    const int rank = emulated_rank();
    auto* const word = static_cast<unsigned long long*>(emulator::emulator_address(rank, peer, signal));
    emulator::emulator_add(rank, peer, 1 + reinterpret_cast<u64>(signal) / sizeof(u64) % 3, word, add);
}
inline i32 moecomm_nvshmem_acquire_signal(const u64* signal, u64 least) { return *signal >= least; }
inline void moecomm_nvshmem_quiet() { emulator::emulator_quiet(emulated_rank()); }
inline void moecomm_nvshmem_fence() { moecomm_nvshmem_quiet(); }

}  // namespace moecomm
