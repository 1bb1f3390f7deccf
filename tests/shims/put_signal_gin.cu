// A kernel as the gin backend's will be: one warp puts to a peer, signals it, awaits the signal that it is sent itself, and makes sure that
// its source may be written again.  It knows NCCL through shims.h alone, and every wait is one of ours.
#include "device/wait.cuh"
#include "shims/shims.h"

using namespace moecomm;

struct Args {
    Context ctx;
    const void* comm;    // ncclDevComm
    const void* window;  // ncclWindow_t
    u64 to, from, bytes;
    i32 to_peer, from_peer;
    u32 tag;
};

constexpr u32 kContext = 0, kSignal = 3;

extern "C" __global__ void __launch_bounds__(32, 1) put_signal(const __grid_constant__ Args args) {
    const Round round{args.ctx, Op::dispatch, args.tag};
    const u32 lane = threadIdx.x;
    bool ok = true;
    if (lane == 0) {
        i32 room = 0;
        ok = wait_for(
            round, Phase::payload, args.to_peer, 1,
            [&] { return (room = moecomm_gin_has_room(args.comm, kContext, args.to_peer, 1)) != 0; },
            [&] { return static_cast<i64>(room); });
        ok = ok && room > 0;
    }
    if (!__shfl_sync(kAllLanes, ok, 0)) return;
    moecomm_gin_put_signal_warp(args.comm, kContext, args.to_peer, args.window, args.to, args.window, args.from, args.bytes, kSignal, 1);
    if (lane != 0) return;
    u64 seen = 0;
    const bool came = wait_for(
        round, Phase::payload, args.from_peer, args.tag,
        [&] { return (seen = moecomm_gin_read_signal(args.comm, kContext, kSignal)) >= args.tag; }, [&] { return static_cast<i64>(seen); });
    if (!came) return;
    u64 ticket[2];
    moecomm_gin_flush_begin(args.comm, kContext, args.to_peer, ticket);
    i32 ended = 0;
    wait_for(
        round, Phase::drained, args.to_peer, 1, [&] { return (ended = moecomm_gin_flush_ended(args.comm, kContext, ticket)) != 0; },
        [&] { return static_cast<i64>(ended); });
}
