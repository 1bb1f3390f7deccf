// All calls of a transport that puts, in the order of a round: room, a put, a signal behind it, the peer's signal, and the end of the
// put. Behind an include of the transport, and a definition of TRANSPORT.
#include "device/wait.cuh"

using namespace moecomm;

struct Args {
    Context ctx;
    u64 to, from, bytes, which, amount;
    i32 scaleup_peer, scaleout_peer;
    u32 tag;
};

extern "C" __global__ void __launch_bounds__(32, 1) transport(const __grid_constant__ Args args) {
    static_assert(!TRANSPORT::all_reachable);
    const Round round{args.ctx, Op::dispatch, args.tag};
    const TRANSPORT first(args.ctx);
    const TRANSPORT t(args.ctx, static_cast<i32>(blockIdx.x) % first.channels());
    const i32 lane = static_cast<i32>(threadIdx.x);
    i32 room = 1;
    if (lane == 0)
        wait_for(
            round, Phase::payload, args.scaleout_peer, 1, [&] { return (room = t.has_room(args.scaleout_peer, 1)) != 0; },
            [&] { return static_cast<i64>(room); });
    if (__shfl_sync(kAllLanes, room, 0) <= 0) return;
    t.local<u8>(args.from)[lane] = static_cast<u8>(lane);
    __syncwarp();
    t.put(args.scaleout_peer, args.to, args.from, args.bytes);
    t.put_ahead(args.scaleout_peer, args.to, args.from, args.bytes);
    t.settle();
    if (lane != 0) return;
    u64 ticket[2];
    t.sent_begin(args.scaleout_peer, ticket);
    t.add(args.scaleout_peer, args.which, args.amount);
    if (t.peer_ptr<u8>(args.scaleup_peer, args.to) != nullptr) t.signal(args.scaleup_peer, args.to, args.tag);
    t.fence();
    t.post(args.scaleup_peer, args.to, args.tag);
    u64 seen = 0;
    const bool came = wait_for(
        round, Phase::payload, args.scaleout_peer, args.tag, [&] { return (seen = t.signal_value(args.which)) >= args.tag; },
        [&] { return static_cast<i64>(seen); });
    i32 ended = 0;
    if (came)
        wait_for(
            round, Phase::drained, args.scaleout_peer, 1, [&] { return (ended = t.sent_ended(args.scaleout_peer, ticket)) != 0; },
            [&] { return static_cast<i64>(ended); });
}
