// What kernels call of NCCL's and NVSHMEM's device libraries, with none of their types: device communicators, windows and symmetric
// addresses cross as plain pointers and numbers.  gin.cu and nvshmem.cu define these functions; they are compiled to LTO IR when the
// wheel is built (build.py) and linked to the kernel when it is compiled (moecomm/jit/linking.py), so that a kernel needs neither header.
//
// Without a suffix: for one thread.  With `_warp`: by all lanes of a warp together, with the same arguments.
//
// Nothing here waits for a peer's signal: kernels poll read_signal in a wait of device/wait.cuh.  Some functions can wait inside the
// library all the same, with no deadline of ours; each says so.
//
// Words: *settled* is written where the peer can read it.  A signal is *strong* if whoever has seen it (an acquire) also sees all
// earlier puts, and gets nothing to do with later ones; *weak* if it speaks for the put it travels with alone.
// Line numbers are those of NCCL 2.30.7 (below include/nccl_device) and of NVSHMEM 3.4.5 (below include).
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {
extern "C" {

// ---- NCCL GIN.  comm: a ncclDevComm in memory that this GPU reads.  context: of GIN; its signals and its order are its own.  peer: rank
// of the communicator (over RAIL connections, one of our own index in its domain).  window: a ncclWindow_t; offsets count in it.  signal:
// below ginSignalCount.

// Null where our loads and stores do not reach the peer: it is not of our LSA team (core.h:223, 270).
__device__ void* moecomm_gin_peer_ptr(const void* comm, const void* window, u64 offset, i32 peer);

// How many contexts there are: NCCL may have made more or fewer than it was asked for (core.h:98).
__device__ u32 moecomm_gin_contexts(const void* comm);

// `bytes` of our window to a peer's.  Puts are not ordered with each other (gin.h:235-238).  What this thread, or the warp, has seen
// written before is what is sent: a release comes first (gin_proxy.h:218, gin_gdaki.h:92-96).  `from` must not change before a flush.
// Waits while the queue is full, for ever if nobody empties it (gin_proxy.h:80): see has_room.
__device__ void moecomm_gin_put(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window, u64 from,
                                u64 bytes);
__device__ void moecomm_gin_put_warp(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                     u64 from, u64 bytes);

// The same, then `add` onto the peer's signal.  Strong: all earlier puts of this context to this peer, by any thread whose put came
// before ours, are settled when it is seen (gin.h:58-62, 236-237).  At most 1 GiB.
__device__ void moecomm_gin_put_signal(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                       u64 from, u64 bytes, u32 signal, u64 add);
__device__ void moecomm_gin_put_signal_warp(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                            u64 from, u64 bytes, u32 signal, u64 add);
// The same with a u64 of the peer's window as the signal (gin.h:39-44); it is read as any flag of ours is (gin__funcs.h:856-861).  Wants
// ginVaSignalsRequired, and the word may not be written in any other way while signals are under way.
__device__ void moecomm_gin_put_flag(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                     u64 from, u64 bytes, const void* flag_window, u64 flag, u64 add);
__device__ void moecomm_gin_put_flag_warp(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                          u64 from, u64 bytes, const void* flag_window, u64 flag, u64 add);

// A u64 into the peer's window, whole; it is not read from memory, so that nothing has to be flushed.  Not ordered with other puts.
__device__ void moecomm_gin_put_value(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, u64 value);

// `add` onto the peer's signal, or onto a u64 of its window, without a put of its own: strong, as above (gin.h:58-62, 303-308).
__device__ void moecomm_gin_signal(const void* comm, u32 context, i32 peer, u32 signal, u64 add);
__device__ void moecomm_gin_flag(const void* comm, u32 context, i32 peer, const void* flag_window, u64 flag, u64 add);

// Our own signal, what was added since its last reset; an acquire at system scope: what a strong signal covers may be read afterwards
// (gin__funcs.h:847-853).
__device__ u64 moecomm_gin_read_signal(const void* comm, u32 context, u32 signal);
// From here on our signal counts from 0.  Nobody may signal meanwhile (gin.h:376).  The proxy moves an offset, so that the word itself
// only grows (gin_proxy.h:372-374); GDAKI writes 0 (gin_gdaki.h:480); GPI may wait for its NIC to do it (gin_gpi.h:609).
__device__ void moecomm_gin_reset_signal(const void* comm, u32 context, u32 signal);

// `bytes` of a peer's window to ours; there after a flush (gin.h:227-232).
__device__ void moecomm_gin_get(const void* comm, u32 context, i32 peer, const void* from_window, u64 from, const void* to_window, u64 to,
                                u64 bytes);
__device__ void moecomm_gin_get_warp(const void* comm, u32 context, i32 peer, const void* from_window, u64 from, const void* to_window,
                                     u64 to, u64 bytes);

// Until what this context has put to all peers may be overwritten here, and what it got is here (gin.h:310-312); not until it is settled
// there.  NCCL's own wait: it ends early when the word that the communicator's abortFlag points to is set, if there is one
// (utility.h:101-109), and has no deadline; where there is such a word, an error of GDAKI is no end either (gin_gdaki.h:342-347).
__device__ void moecomm_gin_flush(const void* comm, u32 context);
__device__ void moecomm_gin_flush_warp(const void* comm, u32 context);

// The same for the puts to one peer, in two steps that fit into a wait of ours; not for gets.  begin: remembers what has been put.
// ended: 1, the sources may be overwritten; 0, not yet; -1, the transport failed, and they never arrive.  `ticket`: two words.
__device__ void moecomm_gin_flush_begin(const void* comm, u32 context, i32 peer, u64* ticket);
__device__ i32 moecomm_gin_flush_ended(const void* comm, u32 context, const u64* ticket);

// 1 if the next `posts` puts and signals of this context to this peer will not have to wait for room; 0 not now; -1, the transport failed.
// With `posts` the number of threads that may post at the same time, each of which asks before each post of at most 1 GiB, no post waits
// inside NCCL for another machine or for the proxy: polled in a wait of ours, this puts our deadline on NCCL's queue.
// Where the queue has less room than for `posts`, 1 means that it is empty: posts may then wait inside NCCL for each other.
__device__ i32 moecomm_gin_has_room(const void* comm, u32 context, i32 peer, u32 posts);

// ---- NVSHMEM.  Addresses of peers are those of our own symmetric heap.  A source may be any memory here inside the NVLink domain; with a
// NIC it lies in the heap or is registered.

// Null where our loads and stores do not reach the peer (device/nvshmem_defines.h:1238).
__device__ void* moecomm_nvshmem_ptr(const void* local, i32 peer);

// Puts return at once; they are not ordered with each other, and `from` must not change before a quiet.
// Inside the NVLink domain they are the caller's own stores.
__device__ void moecomm_nvshmem_put(void* to, const void* from, u64 bytes, i32 peer);
__device__ void moecomm_nvshmem_put_warp(void* to, const void* from, u64 bytes, i32 peer);

// The same, then the peer's u64 `signal` is added to, or set.  Weak: seen, this put is settled, and no other one
// (nvshmemi_common_device.cuh:436-462).  Strong after a fence.
__device__ void moecomm_nvshmem_put_signal_add(void* to, const void* from, u64 bytes, u64* signal, u64 add, i32 peer);
__device__ void moecomm_nvshmem_put_signal_add_warp(void* to, const void* from, u64 bytes, u64* signal, u64 add, i32 peer);
__device__ void moecomm_nvshmem_put_signal_set(void* to, const void* from, u64 bytes, u64* signal, u64 value, i32 peer);
__device__ void moecomm_nvshmem_put_signal_set_warp(void* to, const void* from, u64 bytes, u64* signal, u64 value, i32 peer);

// A u64 to the peer, whole, in any order; `value` is not read from memory.
__device__ void moecomm_nvshmem_put_value(u64* to, u64 value, i32 peer);

// The peer's signal alone.  Weak: it speaks for nothing else; strong after a fence.  Where peers are of several domains, adding takes the
// network to a peer over NVLink too (nvshmemi_common_device.cuh:419-439): set it, or use moecomm_nvshmem_ptr there.
__device__ void moecomm_nvshmem_signal_add(u64* signal, u64 add, i32 peer);
__device__ void moecomm_nvshmem_signal_set(u64* signal, u64 value, i32 peer);

// Our own signal as it is now (nvshmem_defines.h:581-584): says all by itself.
__device__ u64 moecomm_nvshmem_read_signal(const u64* signal);
// 1 if our signal, which only grows, has come to `least`; then what it speaks for may be read, even where a NIC wrote it and the GPU has
// to be told (nvshmem_defines.h:439-445, transfer_device.cuh:67-75).  To be called once read_signal has shown it.
__device__ i32 moecomm_nvshmem_acquire_signal(const u64* signal, u64 least);

// A signal has to be an ordinary word before it is one: nobody may signal it meanwhile.
__device__ void moecomm_nvshmem_reset_signal(u64* signal);

// What the peer has, into our heap; there after a quiet.
__device__ void moecomm_nvshmem_get(void* to, const void* from, u64 bytes, i32 peer);
__device__ void moecomm_nvshmem_get_warp(void* to, const void* from, u64 bytes, i32 peer);

// quiet: all earlier puts of this GPU that this thread has made or seen made are settled, gets are here, and sources may be overwritten
// (nvshmemi_common_device.cuh:130-141); what is signalled afterwards is strong.  fence: the same of puts alone.  It is a quiet too, and
// not nvshmem_fence, which forgets queues where a GPU has several NICs: it counts those of one (ibgda_device.cuh:3457; quiet: 3423-3424),
// and puts of one thread take turns between NICs (1840-1847).
// Inside one NVLink domain each is a fence of this thread.  With IBGDA it waits for all queues of the GPU (3419-3446), with no deadline of
// ours; so may a put for room in its queue.
__device__ void moecomm_nvshmem_fence();
__device__ void moecomm_nvshmem_quiet();
__device__ void moecomm_nvshmem_quiet_warp();

}  // extern "C"
}  // namespace moecomm
