// The functions of NCCL's and NVSHMEM's device libraries that kernels call, without their types: device communicators, windows and
// symmetric addresses are plain pointers and numbers.  gin.cu and nvshmem.cu define these functions; they are compiled to LTO IR when the
// wheel is built (build.py) and linked to the kernel when it is compiled (moecomm/gpu/linking.py), so that a kernel needs neither header.
//
// Callers: one thread, or, with the suffix `_warp`, all lanes of a warp together with the same arguments.
//
// No function waits for a peer's signal: kernels poll read_signal in a wait of device/wait.cuh.  Some functions can still wait inside the
// library, without moecomm's deadline; each says so.  A function returning void reports no failure.
//
// Words: a put is *settled* when the peer can read it.  A signal is *strong* if an acquire of it makes all earlier puts visible; *weak* if
// it covers only the put that carries it.
// Line numbers are those of NCCL 2.30.7 (below include/nccl_device) and of NVSHMEM 3.4.5 (below include).
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {
extern "C" {

// ---- NCCL GIN.  comm: a ncclDevComm in memory that this GPU reads.  context: a GIN context, with signals and an order of its own.  peer:
// rank in the communicator (over RAIL connections, one with this rank's index in its domain).  window: a ncclWindow_t; offsets are bytes in
// it.  signal: below ginSignalCount.

// Address in a peer's window for loads and stores; null if the peer is not in this rank's LSA team (core.h:223, 270).
__device__ void* moecomm_gin_peer_ptr(const void* comm, const void* window, u64 offset, i32 peer);

// Number of contexts.  NCCL may have made more or fewer than requested (core.h:98).
__device__ u32 moecomm_gin_contexts(const void* comm);

// Put `bytes` of this rank's window into a peer's.  Puts are not ordered with each other (gin.h:235-238).  A release comes first, so that
// writes which this thread or warp has observed are sent (gin_proxy.h:218, gin_gdaki.h:92-96).  `from` must not change before a flush.
// Waits while the queue is full, forever if nothing drains it (gin_proxy.h:80): see has_room.
__device__ void moecomm_gin_put(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window, u64 from,
                                u64 bytes);
__device__ void moecomm_gin_put_warp(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                     u64 from, u64 bytes);

// Put, then add `add` to the peer's signal.  Strong: when the signal is seen, all earlier puts of this context to this peer, by any thread
// whose put came before, are settled (gin.h:58-62, 236-237).  At most 1 GiB.  Waits as a put does.
__device__ void moecomm_gin_put_signal(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                       u64 from, u64 bytes, u32 signal, u64 add);
__device__ void moecomm_gin_put_signal_warp(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                            u64 from, u64 bytes, u32 signal, u64 add);
// Put, then add `add` to a u64 of the peer's window (gin.h:39-44), which the peer reads with an ordinary acquire (gin__funcs.h:856-861).
// Strong.  Requires ginVaSignalsRequired; nothing else may write the word while signals are in flight.
__device__ void moecomm_gin_put_flag(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                     u64 from, u64 bytes, const void* flag_window, u64 flag, u64 add);
__device__ void moecomm_gin_put_flag_warp(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                          u64 from, u64 bytes, const void* flag_window, u64 flag, u64 add);

// Put a u64 into the peer's window, without tearing.  It is passed by value, so no flush is needed.  Not ordered with other puts.
__device__ void moecomm_gin_put_value(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, u64 value);

// Add `add` to the peer's signal, or to a u64 of its window, without a put.  Strong, as above (gin.h:58-62, 303-308).
__device__ void moecomm_gin_signal(const void* comm, u32 context, i32 peer, u32 signal, u64 add);
__device__ void moecomm_gin_flag(const void* comm, u32 context, i32 peer, const void* flag_window, u64 flag, u64 add);

// Return this rank's own signal, counted from its last reset.  An acquire at system scope: puts that a strong signal covers may be read
// afterwards (gin__funcs.h:847-853).
__device__ u64 moecomm_gin_read_signal(const void* comm, u32 context, u32 signal);
// Reset this rank's own signal to 0.  No peer may signal meanwhile (gin.h:376).  The proxy moves an offset, so that the word itself only
// grows (gin_proxy.h:372-374); GDAKI writes 0 (gin_gdaki.h:480); GPI may wait for its NIC to do it (gin_gpi.h:609).
__device__ void moecomm_gin_reset_signal(const void* comm, u32 context, u32 signal);

// Get `bytes` of a peer's window into this rank's; complete after a flush (gin.h:227-232).
__device__ void moecomm_gin_get(const void* comm, u32 context, i32 peer, const void* from_window, u64 from, const void* to_window, u64 to,
                                u64 bytes);
__device__ void moecomm_gin_get_warp(const void* comm, u32 context, i32 peer, const void* from_window, u64 from, const void* to_window,
                                     u64 to, u64 bytes);

// Wait until the sources of this context's puts to all peers may be overwritten and its gets are complete (gin.h:310-312); the puts need
// not be settled.  NCCL's own wait, without a deadline: it ends early only when the word at the communicator's abortFlag, if there is one,
// is set (utility.h:101-109).  With such a word, an error of GDAKI does not end it either (gin_gdaki.h:342-347).
__device__ void moecomm_gin_flush(const void* comm, u32 context);
__device__ void moecomm_gin_flush_warp(const void* comm, u32 context);

// Flush the puts (not the gets) to one peer without waiting inside NCCL.  begin: records the puts so far in `ticket`, two words.
// ended: 1, the sources may be overwritten; 0, not yet; -1, the transport failed and the puts never arrive.
__device__ void moecomm_gin_flush_begin(const void* comm, u32 context, i32 peer, u64* ticket);
__device__ i32 moecomm_gin_flush_ended(const void* comm, u32 context, const u64* ticket);

// Return 1 if the next `posts` puts and signals of this context to this peer find room in the queue; 0, not now; -1, the transport failed.
// Poll it in a wait with a deadline before each post of at most 1 GiB, with `posts` the number of threads that may post concurrently: no
// post then waits inside NCCL for another machine or for the proxy.
// If the whole queue is smaller than `posts` need, 1 means that it is empty: posts may then wait inside NCCL for each other.
__device__ i32 moecomm_gin_has_room(const void* comm, u32 context, i32 peer, u32 posts);

// ---- NVSHMEM.  Addresses of peers are given as addresses in this rank's symmetric heap.  Inside the NVLink domain, a source may be any
// local memory; with a NIC it must be in the heap or registered.

// Address at the peer for loads and stores; null if they do not reach it (device/nvshmem_defines.h:1238).
__device__ void* moecomm_nvshmem_ptr(const void* local, i32 peer);

// Put without waiting for completion.  Puts are not ordered with each other, and `from` must not change before a quiet.
// Inside the NVLink domain, puts are stores of the calling thread.
__device__ void moecomm_nvshmem_put(void* to, const void* from, u64 bytes, i32 peer);
__device__ void moecomm_nvshmem_put_warp(void* to, const void* from, u64 bytes, i32 peer);

// Put, then add to or set the peer's u64 `signal`.  Weak: it covers this put and no other (nvshmemi_common_device.cuh:436-462).  Strong
// after a fence.
__device__ void moecomm_nvshmem_put_signal_add(void* to, const void* from, u64 bytes, u64* signal, u64 add, i32 peer);
__device__ void moecomm_nvshmem_put_signal_add_warp(void* to, const void* from, u64 bytes, u64* signal, u64 add, i32 peer);
__device__ void moecomm_nvshmem_put_signal_set(void* to, const void* from, u64 bytes, u64* signal, u64 value, i32 peer);
__device__ void moecomm_nvshmem_put_signal_set_warp(void* to, const void* from, u64 bytes, u64* signal, u64 value, i32 peer);

// Put a u64 passed by value, without tearing.  Not ordered with other puts.
__device__ void moecomm_nvshmem_put_value(u64* to, u64 value, i32 peer);

// Add to or set the peer's signal without a put.  Weak: it covers no put; strong after a fence.  With several domains, adding uses the
// network even to a peer over NVLink (nvshmemi_common_device.cuh:419-439): set it there, or use moecomm_nvshmem_ptr.
__device__ void moecomm_nvshmem_signal_add(u64* signal, u64 add, i32 peer);
__device__ void moecomm_nvshmem_signal_set(u64* signal, u64 value, i32 peer);

// Return this rank's own signal (nvshmem_defines.h:581-584).  Before reading the puts that it covers, call acquire_signal.
__device__ u64 moecomm_nvshmem_read_signal(const u64* signal);
// Return 1 if this rank's own signal, which must only grow, is at least `least`, else 0.  After 1, the puts that it covers may be read,
// even those that a NIC wrote (nvshmem_defines.h:439-445, transfer_device.cuh:67-75).  Call it once read_signal has shown the value.
__device__ i32 moecomm_nvshmem_acquire_signal(const u64* signal, u64 least);

// Set this rank's own signal to 0 with an ordinary store.  No peer may signal meanwhile.
__device__ void moecomm_nvshmem_reset_signal(u64* signal);

// Get `bytes` from the peer into this rank's heap; complete after a quiet.
__device__ void moecomm_nvshmem_get(void* to, const void* from, u64 bytes, i32 peer);
__device__ void moecomm_nvshmem_get_warp(void* to, const void* from, u64 bytes, i32 peer);

// quiet: settle all earlier puts that this thread has made or observed, and complete gets; sources may then be overwritten
// (nvshmemi_common_device.cuh:130-141), and later signals are strong.  fence: the same for puts alone.  It is implemented as a quiet,
// because nvshmem_fence covers the queues of one NIC only (ibgda_device.cuh:3457; quiet: 3423-3424), while the puts of a thread alternate
// between the GPU's NICs (1840-1847).
// Inside one NVLink domain each is a memory fence of this thread.  With IBGDA it waits for all queues of the GPU (3419-3446), without
// moecomm's deadline; a put may also wait for room in its queue.
__device__ void moecomm_nvshmem_fence();
__device__ void moecomm_nvshmem_quiet();
__device__ void moecomm_nvshmem_quiet_warp();

}  // extern "C"
}  // namespace moecomm
