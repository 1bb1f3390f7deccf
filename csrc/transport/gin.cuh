// NCCL GIN: loads and stores inside our domain, which is NCCL's LSA team; puts and indexed signals to ranks of others.
//
// A channel is a context of GIN, with queues and signals of its own.  Nothing orders two of them, and nobody knows by which one a signal
// comes: what a signal stands at is the sum over all contexts.  Each word has one writer, who adds to it again only by the same channel, or
// after we have answered what it said before; so the sum is never one that it did not mean.
#pragma once
#include "../shims/shims.h"
#include "transport.cuh"

namespace moecomm {

// What Context::link points to; moecomm/backends/gin.py fills it in.
struct GinLink {
    u64 comm;    // ncclDevComm*, in memory of this GPU
    u64 window;  // ncclWindow_t
};

struct Gin : Lsa {
    static constexpr bool all_reachable = false;
    u32 context;

    MOECOMM_FN explicit Gin(const Context& c, i32 channel = 0) : Lsa{c}, context(channel) {}

    MOECOMM_FN const void* comm() const { return reinterpret_cast<const void*>(reinterpret_cast<const GinLink*>(ctx.link)->comm); }
    MOECOMM_FN const void* handle() const { return reinterpret_cast<const void*>(reinterpret_cast<const GinLink*>(ctx.link)->window); }

    MOECOMM_FN i32 channels() const { return static_cast<i32>(moecomm_gin_contexts(comm())); }
    MOECOMM_FN void put(i32 peer, u64 to, u64 from, u64 bytes) const {
        moecomm_gin_put_warp(comm(), context, peer, handle(), to, handle(), from, bytes);
    }
    MOECOMM_FN void add(i32 peer, u64 which, u64 amount) const {
        moecomm_gin_signal(comm(), context, peer, static_cast<u32>(which), amount);
    }
    MOECOMM_FN u64 signal_value(u64 which) const {
        u64 value = 0;
        for (i32 c = channels(); c-- > 0;) value += moecomm_gin_read_signal(comm(), c, static_cast<u32>(which));
        return value;
    }
    // The shim counts two entries of the queue a post, a put and its signal.  Ours are one or the other.
    MOECOMM_FN i32 has_room(i32 peer, i32 posts) const { return moecomm_gin_has_room(comm(), context, peer, (posts + 1) / 2); }
    MOECOMM_FN void sent_begin(i32 peer, u64* ticket) const { moecomm_gin_flush_begin(comm(), context, peer, ticket); }
    MOECOMM_FN i32 sent_ended(i32, const u64* ticket) const { return moecomm_gin_flush_ended(comm(), context, ticket); }
};

}  // namespace moecomm
