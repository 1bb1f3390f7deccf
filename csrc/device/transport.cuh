// How a kernel reaches the windows of its peers.  Kernels are templates over a Transport, which is one of these types, chosen when the
// kernel is compiled.  What each of them offers:
//
//   T*   local<T>(offset)                                   in our own window
//   T*   peer_ptr<T>(rank, offset)                          in the window of `rank`; null where our loads and stores do not reach it
//   void signal(rank, offset, value)                        by one thread: a u64 flag in a peer's window, after all that this thread has
//                                                           written, or has seen written, before
//   void post(rank, offset, value)                          by one thread: a u64 in a peer's window that says all by itself, in any order
//   void fence()                                            by one thread: what it has written, or has seen written, comes before what it
//                                                           posts from now on
//   void put(rank, to, from, bytes, flag, value)            where peer_ptr may be null: by a whole warp, `bytes` of our memory into a
//   peer's
//                                                           window, then the flag, after all that the warp has seen written before
//   constexpr bool all_reachable                            peer_ptr is never null
//
// Flags are waited for in our own window (wait.cuh), whatever the transport.
#pragma once
#include "../protocol/order.h"
#include "config.cuh"

namespace moecomm {

// Ranks of one NVLink domain: everything is a load or a store.
struct Lsa {
    static constexpr bool all_reachable = true;
    const Context& ctx;

    template <class T>
    MOECOMM_FN T* peer_ptr(i32 rank, u64 offset) const {
        return reinterpret_cast<T*>(ctx.peers[rank] + offset);
    }
    template <class T>
    MOECOMM_FN T* local(u64 offset) const {
        return peer_ptr<T>(ctx.rank, offset);
    }
    MOECOMM_FN void signal(i32 rank, u64 offset, u64 value) const { store_release(peer_ptr<u64>(rank, offset), value); }
    MOECOMM_FN void fence() const { fence_system(); }
    MOECOMM_FN void post(i32 rank, u64 offset, u64 value) const { store_relaxed(peer_ptr<u64>(rank, offset), value); }
};

// A rank's peers in the order it serves them: first the one after it, itself last, so that not everybody writes to the same rank at once.
template <i32 ranks>
MOECOMM_FN i32 rotated(i32 me, i32 turn) {
    return (me + 1 + turn) % ranks;
}

}  // namespace moecomm
