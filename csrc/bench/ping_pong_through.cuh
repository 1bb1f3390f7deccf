// Ping-pong through a library's put and signal, whether loads and stores reach the peer or not.
#pragma once
#include "../transport/transport.cuh"
#include "ping_pong.cuh"

namespace moecomm::bench {

// Every warp puts its part; the signal of a block covers all of its parts.
template <class Transport>
struct Through {
    const PingPongArgs& a;
    const Transport& transport;
    i32 peer;
    i32 posts;  // at a time, by all blocks that share this channel

    MOECOMM_FN bool put() const {
        const i64 movers = gridDim.x * (blockDim.x / kWarp), mover = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
        const i64 part = align_up<i64>(ceil_div(a.bytes, movers), 16), first = mover * part, size = min(part, a.bytes - first);
        if (size <= 0) return true;
        if (!room()) return false;
        transport.put(peer, a.here + kPayload + first - a.window, a.source + first - a.window, size);
        return true;
    }
    // Wait until the library's queue has room, so that the put does not block. Called by a whole warp. False on timeout, abort or a broken
    // path.
    MOECOMM_FN bool room() const {
        i32 found = 1;
        if (threadIdx.x % kWarp == 0) {
            const Waited waited = wait_until(deadline_of(a), [&] { return (found = transport.has_room(peer, posts)) != 0; });
            if (waited != Waited::ok || found < 0) {
                give_up(a, waited == Waited::ok ? Waited::aborted : waited);
                found = 0;
            }
        }
        return __shfl_sync(kAllLanes, found, 0) != 0;
    }
    MOECOMM_FN void signal(i64) const { transport.add(peer, a.which, 1); }
    MOECOMM_FN u64 signals() const { return transport.signal_value(a.which); }
};

// Kernel body, called by all threads.
template <class Transport>
MOECOMM_FN void ping_pong_through(const PingPongArgs& a) {
    __shared__ Context ctx;
    if (threadIdx.x == 0) {  // ranks 0 and 1 take part; rank 0 starts
        ctx.rank = a.starts ? 0 : 1;
        ctx.peers[ctx.rank] = a.window;
        ctx.link = a.link;
        ctx.window.signals = a.here - a.window;
    }
    __syncthreads();
    const i32 channels = Transport(ctx).channels(), blocks = gridDim.x, warps = blockDim.x / kWarp;
    const Transport transport(ctx, static_cast<i32>(blockIdx.x) % channels);
    alternate(a, Through<Transport>{a, transport, a.starts ? 1 : 0, ceil_div(blocks, channels) * (warps + 1)});
}

}  // namespace moecomm::bench
