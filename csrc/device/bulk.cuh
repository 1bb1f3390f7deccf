// Bulk copies (TMA) between a block's shared memory and any address, and the mbarriers that count their bytes.
//
// Bulk copies run in the async proxy; ordinary loads and stores run in the generic proxy. A write in one becomes visible in the other:
//   bulk load -> ordinary loads, bulk stores   after copy_wait() by the reading thread,
//   ordinary stores -> bulk copies             after fence_async() by the thread that stored (or acquired), then a barrier, then the copy,
//   bulk stores -> a flag of this rank         after bulk_wait() by the thread that issued them.
// Addresses and sizes are multiples of 16 bytes. One thread calls each function; none of them can fail.
//
// Payload travels by bulk copy because 8 blocks then fill the links: 330 GB/s written and 323 read, where 16-byte stores and loads of
// threads reach 308 and 221, and hardly more with more blocks (bench/results/all-to-all-h200-4.json).
#pragma once
#include "config.cuh"

namespace moecomm {

MOECOMM_FN u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Initialize an mbarrier that completes a phase after `arrivals` arrivals. barrier_init_done follows.
MOECOMM_FN void barrier_init(u64* barrier, i32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Make initialized mbarriers visible to bulk copies. A __syncthreads follows.
MOECOMM_FN void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Issue a load whose bytes complete this phase of `barrier`, which was initialized with one arrival: this call's.
MOECOMM_FN void bulk_load(void* to, const void* from, i32 bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
// Likewise of two loads at once.
MOECOMM_FN void bulk_load_both(void* to, const void* from, i32 bytes, void* to_too, const void* from_too, i32 bytes_too, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes + bytes_too)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to_too)),
                 "l"(from_too), "r"(bytes_too), "r"(shared_address(barrier))
                 : "memory");
}
// Wait until the load has completed. Needs no deadline: an issued copy ends, or the context has faulted.
MOECOMM_FN void copy_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Issue a store to the current group. `from` may be overwritten after bulk_wait_read; the bytes are written after bulk_wait.
MOECOMM_FN void bulk_store(void* to, const void* from, i32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
// Close the group of this thread's bulk stores since the last call; a group may be empty.
MOECOMM_FN void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until all but the last `groups` groups of this thread have been read from shared memory, which may then be overwritten.
template <i32 groups>
MOECOMM_FN void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}
// Wait until all but the last `groups` groups of this thread have been written.
template <i32 groups>
MOECOMM_FN void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(groups) : "memory");
}

// Order generic accesses to global memory before later bulk copies. Limited to global memory it is one instruction; for all state spaces it
// would first wait for all outstanding accesses (MEMBAR.ALL.GPU), which made most combines up to 1 % slower on 2 H200s.
MOECOMM_FN void fence_async() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
MOECOMM_FN void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace moecomm
