// Gin: loads and stores inside this domain, which is NCCL's LSA team; GIN puts and indexed signals to ranks of other domains. transport.cuh
// states who calls each method and what it orders.
//
// A channel is a GIN context, with queues and signals of its own. Contexts are not ordered among each other, and the reader does not know
// through which one a signal arrives, so the value of a signal is the sum over all contexts. Each signal has one writer, which adds to it
// again only through the same channel, or after the reader has answered the previous value; so the sum never takes an unintended value.
// NCCL's own words only grow: the word in the window that other transports add to holds the difference, which set_signal changes.
#pragma once
#include "../device/step_counters.cuh"
#include "../protocol/domains.h"
#include "../shims/shims.h"
#include "transport.cuh"

namespace moecomm {

// Target of Context::link. moecomm/backends/gin.py fills it.
struct GinLink {
    u64 comm;    // ncclDevComm*, in memory of this GPU
    u64 window;  // ncclWindow_t
};

struct Gin : Lsa {
    static constexpr bool all_reachable = false;
    static constexpr i64 worth_a_message = 1024;
    u32 context;

    MOECOMM_FN explicit Gin(const Context& c, i32 channel = 0) : Lsa{c}, context(channel) {}

    MOECOMM_FN const void* comm() const { return reinterpret_cast<const void*>(reinterpret_cast<const GinLink*>(ctx.link)->comm); }
    MOECOMM_FN const void* handle() const { return reinterpret_cast<const void*>(reinterpret_cast<const GinLink*>(ctx.link)->window); }

    MOECOMM_FN i32 channels() const { return static_cast<i32>(moecomm_gin_contexts(comm())); }
    MOECOMM_FN void put(i32 peer, u64 to, u64 from, u64 bytes) const {
        moecomm_gin_put_warp(comm(), context, peer, handle(), to, handle(), from, bytes);
    }
    MOECOMM_FN void put_ahead(i32 peer, u64 to, u64 from, u64 bytes) const { put(peer, to, from, bytes); }
    MOECOMM_FN void add(i32 peer, u64 which, u64 amount) const {
        moecomm_gin_signal(comm(), context, peer, static_cast<u32>(which), amount);
    }
    MOECOMM_FN void put_add(i32 peer, u64 to, u64 from, u64 bytes, u64 which, u64 amount) const {
        moecomm_gin_put_signal_warp(comm(), context, peer, handle(), to, handle(), from, bytes, static_cast<u32>(which), amount);
    }
    MOECOMM_FN u64* difference(u64 which) const { return local<u64>(signal_at(ctx.window, which)); }
    MOECOMM_FN void set_signal(u64 which, u64 value) const {
        store_relaxed(difference(which), load_relaxed(difference(which)) + value - signal_value(which));
    }
    MOECOMM_FN u64 signal_value(u64 which) const {
        u64 value = load_relaxed(difference(which));
        for (i32 c = channels(); c-- > 0;) value += moecomm_gin_read_signal(comm(), c, static_cast<u32>(which));
        return value;
    }
    // The shim counts two queue entries for a post (a put and its signal). Here a post is only one of them.
    MOECOMM_FN i32 has_room(i32 peer, i32 posts) const { return moecomm_gin_has_room(comm(), context, peer, (posts + 1) / 2); }
    MOECOMM_FN void sent_begin(i32 peer, u64* ticket) const { moecomm_gin_flush_begin(comm(), context, peer, ticket); }
    MOECOMM_FN i32 sent_ended(i32, const u64* ticket) const { return moecomm_gin_flush_ended(comm(), context, ticket); }
};

// GIN's proxy: a thread of the host posts every message, which takes it about 16 us, the time of 128 KiB (rma_plugin/README.md).
struct GinProxy : Gin {
    static constexpr i64 worth_a_message = 128 * 1024;
    struct Ring {  // for warps that share a chunk (combine/scaleout_return_forward.cuh); nothing is put through it
        u32 done[kOpenSteps];
    };
    using Gin::Gin;
    MOECOMM_FN static void prepare(Ring& ring) {
        for (u32& done : ring.done) done = 0;
    }
    MOECOMM_FN static void pass_through(Ring&) {}
};

}  // namespace moecomm
