// Transports: how a kernel reaches the windows of its peers. Kernels are templates over a Transport, chosen when the kernel is compiled.
// Offsets count from the start of a window. Every transport has:
//
//   T*   local<T>(offset)             address in this rank's window
//   T*   peer_ptr<T>(rank, offset)    address in the window of `rank`; null if loads and stores do not reach it
//   void signal(rank, offset, value)  by one thread: store a u64 flag in a peer's window with release, after all that this thread has
//                                     written or acquired
//   void post(rank, offset, value)    by one thread: store a u64 in a peer's window, relaxed; the word must be self-contained
//   void fence()                      by one thread: order what it has written or acquired before its later posts
//   constexpr bool all_reachable      true if loads and stores reach every rank
//
// If all_reachable is false, the methods below reach ranks of other domains. They are ordered by (channel, peer) as stated; `channel` is
// the second argument of the constructor, 0 by default. They cannot fail, except as has_room and sent_ended report.
//
//   void put(peer, to, from, bytes)   by a whole warp: copy `bytes` at `from` of this rank's window, as this warp sees them, to `to` of the
//                                     peer's window; multiples of 8. Unordered among puts; needs room
//   void put_ahead(peer, to, from, bytes)   by a whole warp: a put that may still read its source when it returns; the next one does not
//                                     wait for it
//   void settle()                     by a whole warp: end its puts ahead. Comes before an add, and before the warp returns
//   void add(peer, which, amount)     by one thread: add to a signal of the peer (csrc/protocol/domains.h). A reader that acquires the new
//                                     value sees all earlier puts of the channel to the peer. Needs room
//   void put_add(peer, to, from, bytes, which, amount)   by a whole warp: a put, then an add by its first lane; one message where the
//                                     library has such. Needs room for both
//   i64  worth_a_message              constexpr: so many unused bytes cost less than a message
//   u64  signal_value(which)          by one thread: acquire a signal of this rank, whichever channel it came through
//   void set_signal(which, value)     by one thread, while no peer adds to it: make a signal of this rank have this value
//   i32  has_room(peer, posts)        by one thread: 1: the next `posts` puts and adds of the channel to the peer do not block;
//                                     0: they would; -1: the path is broken
//   void sent_begin(peer, ticket)     by one thread: record in `ticket` what has been put to the peer
//   i32  sent_ended(peer, ticket)     by one thread: 1: those sources may be overwritten; 0: not yet; -1: the path is broken
//   i32  channels()                   number of channels
//   Ring                              shared memory of a warp that puts, if the transport copies, or if a message costs much; else NoRing
//   void prepare(ring)                static; by one thread before a barrier_init_done: initialize a ring
//   void pass_through(ring)           let puts pass through a ring; only the warp that owns it puts then. A put of few bytes needs none
//
// Flags are always polled in this rank's own window (wait.cuh).
#pragma once
#include "../device/config.cuh"
#include "../protocol/order.h"

namespace moecomm {

struct NoRing {};

// Transport inside one NVLink domain: everything is a load or a store.
struct Lsa {
    static constexpr bool all_reachable = true;
    using Ring = NoRing;
    const Context& ctx;

    template <class T>
    MOECOMM_FN T* peer_ptr(i32 rank, u64 offset) const {
        return reinterpret_cast<T*>(ctx.peers[rank] + offset);
    }
    template <class T>
    MOECOMM_FN T* local(u64 offset) const {
        return peer_ptr<T>(ctx.rank, offset);
    }
    MOECOMM_FN static void prepare(NoRing&) {}
    MOECOMM_FN static void pass_through(NoRing&) {}
    MOECOMM_FN static void settle() {}
    MOECOMM_FN void signal(i32 rank, u64 offset, u64 value) const { store_release(peer_ptr<u64>(rank, offset), value); }
    MOECOMM_FN void fence() const { fence_system(); }
    MOECOMM_FN void post(i32 rank, u64 offset, u64 value) const { store_relaxed(peer_ptr<u64>(rank, offset), value); }
};

// The step-th peer that a rank serves: first the rank after it, itself last, so that ranks do not all write to the same peer at once.
template <i32 ranks>
MOECOMM_FN i32 rotated(i32 me, i32 step) {
    return (me + 1 + step) % ranks;
}

}  // namespace moecomm
