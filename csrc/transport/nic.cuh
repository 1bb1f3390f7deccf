// Nic: Puts at the pace of an emulated NIC, for tests and benchmarks. A message takes the NIC's processor for 1 / message rate and its wire
// for bytes / bandwidth, and has left when both are done; messages before it delay it at either. A signal arrives a latency after itself
// and all earlier puts of its channel to the peer have left; its own bytes are too few to wait for the wire, because a NIC takes turns
// between its queues. transport.cuh states who calls each method and what it orders.
//
// The thread that signals waits until then, because the clocks of two GPUs differ and no time can travel with a signal. So a warp that
// signals stalls, and others go on; a NIC would stall neither. Data is stored early, but no reader looks at it before its signal. Several
// senders to one receiver do not share its bandwidth, and queues have no end.
#pragma once
#include "../device/globaltimer.cuh"
#include "puts.cuh"

namespace moecomm {

constexpr i32 kNicChannels = 16;

// Follows the windows in Context::link. moecomm/backends/emulated_nic.py fills it. u64[kNicChannels][ranks] follows: when the last message
// of the channel to the rank has left, in ns of this GPU's clock.
struct NicLink {
    u64 byte_ps, message_ps, latency_ns;
    u64 processor_ns, wire_ns;  // when each is free
};

struct Nic : Puts {
    i32 way;

    MOECOMM_FN explicit Nic(const Context& context, i32 channel = 0) : Puts{context}, way(channel) {}

    MOECOMM_FN static i32 channels() { return kNicChannels; }
    MOECOMM_FN NicLink& link() const { return *reinterpret_cast<NicLink*>(ctx.link + ctx.shape.ranks * sizeof(u64)); }
    MOECOMM_FN u64* sent(i32 peer) const { return reinterpret_cast<u64*>(&link() + 1) + way * ctx.shape.ranks + peer; }

    // Called by one thread. Takes the processor or the wire for so long, and returns until when. Cannot fail.
    MOECOMM_FN static u64 take(u64& free_ns, u64 picoseconds) {
        const u64 taken = (picoseconds + 999) / 1000;
        atomicMax(&free_ns, now_ns());
        return atomicAdd(&free_ns, taken) + taken;
    }
    // Called by one thread. Takes both for a message, and returns when it has left.
    MOECOMM_FN u64 reserve(u64 bytes) const {
        return max(take(link().processor_ns, link().message_ps), take(link().wire_ns, bytes * link().byte_ps));
    }
    MOECOMM_FN void put(i32 peer, u64 to, u64 from, u64 bytes) const {
        if (threadIdx.x % kWarp == 0) atomicMax(sent(peer), reserve(bytes));
        Puts::put(peer, to, from, bytes);
    }
    MOECOMM_FN void put_ahead(i32 peer, u64 to, u64 from, u64 bytes) const {
        if (threadIdx.x % kWarp == 0) atomicMax(sent(peer), reserve(bytes));
        Puts::put_ahead(peer, to, from, bytes);
    }
    // A message like any put: its signal travels with it.
    MOECOMM_FN void put_add(i32 peer, u64 to, u64 from, u64 bytes, u64 which, u64 amount) const {
        put(peer, to, from, bytes);
        if (threadIdx.x % kWarp == 0) arrive(peer, which, amount, *const_cast<volatile u64*>(sent(peer)));
    }
    MOECOMM_FN void add(i32 peer, u64 which, u64 amount) const {
        const u64 left = take(link().processor_ns, link().message_ps), before = atomicMax(sent(peer), left);
        arrive(peer, which, amount, max(left, before));
    }
    // Called by one thread. Adds to the signal when what has left by then has arrived. Cannot fail.
    MOECOMM_FN void arrive(i32 peer, u64 which, u64 amount, u64 left) const {
        const u64 due = left + link().latency_ns;
        for (u64 now = now_ns(); now < due; now = now_ns()) doze(static_cast<u32>(min((due - now) / 2, u64{1} << 16)));
        Puts::add(peer, which, amount);
    }
};

}  // namespace moecomm
