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
//   constexpr bool all_reachable                            every rank is
//
// Where it is false, ranks of other domains are reached by these alone, over an ordered channel a (channel, peer); `channel` is the second
// argument of the constructor, 0 if there is none:
//
//   void put(peer, to, from, bytes)                by a whole warp: `bytes` of our window at `from`, as the warp has seen them written, to
//                                                  `to` in the peer's; multiples of 8.  In any order; needs room
//   void add(peer, which, amount)                  by one thread: to a signal of the peer (csrc/protocol/domains.h).  Who sees it, an
//                                                  acquire, sees all earlier puts of the channel to the peer.  Needs room
//   u64  signal_value(which)                       by one thread: a signal of ours, whichever channel it came through; an acquire
//   i32  has_room(peer, posts)                     1: the next `posts` puts and adds of the channel to the peer do not wait; 0: they
//                                                  would; -1: the way there is broken
//   void sent_begin(peer, ticket)                  by one thread: remembers what has been put to the peer.  i32 sent_ended(peer, ticket):
//                                                  1: it may be overwritten here; 0: not yet; -1
//   i32  channels()                                how many there are
//
// Flags are waited for in our own window (wait.cuh), whatever the transport.
#pragma once
#include "../device/config.cuh"
#include "../protocol/order.h"

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
MOECOMM_FN i32 rotated(i32 me, i32 step) {
    return (me + 1 + step) % ranks;
}

}  // namespace moecomm
