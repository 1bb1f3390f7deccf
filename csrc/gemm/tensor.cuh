// Tensor copies (TMA) of a box into shared memory of one block or of all blocks of a cluster, and barriers across the cluster.
//
// Loads are issued by one thread; their bytes complete a phase of `barrier`, on which readers wait with copy_wait().  None of the functions
// can fail.
#pragma once
#include "../device/bulk.cuh"
#include "args.h"

namespace moecomm {

// L2 cache hints: the constants of CUTLASS (TMA::CacheHintSm90, EVICT_NORMAL and EVICT_FIRST).
constexpr u64 kKeepNormal = 0x1000000000000000ull, kKeepLeast = 0x12f0000000000000ull;

MOECOMM_FN void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(&map)) : "memory");
}
// Arrives once, and adds `bytes` to those that this phase of the barrier waits for.  One thread.
MOECOMM_FN void expect_bytes(u64* barrier, i32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Loads a box into this block.  Coordinates count elements, the fastest dimension first.
MOECOMM_FN void load_box(u32 to, const TensorMap& map, i32 column, i32 row, i32 matrix, u64* barrier, u64 keep) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::
            "r"(to),
        "l"(reinterpret_cast<u64>(&map)), "r"(column), "r"(row), "r"(matrix), "r"(shared_address(barrier)), "l"(keep)
        : "memory");
}
// Loads a box of a matrix that stores all gate rows before all up rows; `pair` counts groups of 8 gate rows and their 8 up rows.
MOECOMM_FN void load_pairs(u32 to, const TensorMap& map, i32 column, i32 pair, i32 matrix, u64* barrier, u64 keep) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, 0, 0, %3, %4}], [%5], "
        "%6;" ::"r"(to),
        "l"(reinterpret_cast<u64>(&map)), "r"(column), "r"(pair), "r"(matrix), "r"(shared_address(barrier)), "l"(keep)
        : "memory");
}
// Loads a box to the same place in all blocks of the cluster (.multicast::cluster); its bytes count at each block's own barrier.
template <i32 cluster>
MOECOMM_FN void load_box_for_all(u32 to, const TensorMap& map, i32 column, i32 row, u64* barrier, u64 keep) {
    if constexpr (cluster == 1) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::
                "r"(to),
            "l"(reinterpret_cast<u64>(&map)), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(keep)
            : "memory");
    } else {
        constexpr u16 everybody = (1 << cluster) - 1;
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
            " [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
            "l"(reinterpret_cast<u64>(&map)), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(everybody), "l"(keep)
            : "memory");
    }
}

// Returns the rank of this block in its cluster.  Volatile, so that the compiler reads it again rather than hold a register.
MOECOMM_FN i32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<i32>(rank);
}
// Arrives at the barrier at the same place in block `rank` of the cluster.  One thread.  Does not make this block's ordinary stores visible
// to the other block: a release at cluster scope would be a fence of all memory.
MOECOMM_FN void arrive_at(u64* barrier, i32 rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t"
        "}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}
// Arrives at a barrier of this block.  One thread.  Releases at block scope.
MOECOMM_FN void arrive(u64* barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory"); }
// A barrier of all threads of all blocks of the cluster; release and acquire.
template <i32 cluster>
MOECOMM_FN void sync_cluster() {
    if constexpr (cluster == 1) {
        __syncthreads();
    } else {
        asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
    }
}

// Raise and lower the registers of each thread of a warpgroup (setmaxnreg).  All warps of the warpgroup call them.
template <i32 registers>
MOECOMM_FN void reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <i32 registers>
MOECOMM_FN void reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace moecomm
