// A kernel as the nvshmem backend's will be: one warp stores to a peer that its stores reach, or puts to one that they do not, signals it,
// and awaits the signal that it is sent itself.  It knows NVSHMEM through shims.h alone, and the wait is one of ours.
#include "device/wait.cuh"
#include "shims/shims.h"

using namespace moecomm;

struct Args {
    Context ctx;
    u64* to;
    const u64* from;
    u64* flag;
    u64 words;
    i32 to_peer, from_peer;
    u32 tag;
};

extern "C" __global__ void __launch_bounds__(32, 1) put_signal(const __grid_constant__ Args args) {
    const Round round{args.ctx, Op::dispatch, args.tag};
    const u32 lane = threadIdx.x;
    if (auto* there = static_cast<u64*>(moecomm_nvshmem_ptr(args.to, args.to_peer))) {
        for (u64 i = lane; i < args.words; i += kWarp) there[i] = args.from[i];
        __syncwarp();
        if (lane == 0) store_release(static_cast<u64*>(moecomm_nvshmem_ptr(args.flag, args.to_peer)), args.tag);
    } else {
        moecomm_nvshmem_put_signal_set_warp(args.to, args.from, args.words * 8, args.flag, args.tag, args.to_peer);
    }
    if (lane != 0) return;
    u64 seen = 0;
    const bool came = wait_for(
        round, Phase::payload, args.from_peer, args.tag, [&] { return (seen = moecomm_nvshmem_read_signal(args.flag)) >= args.tag; },
        [&] { return static_cast<i64>(seen); });
    if (came) moecomm_nvshmem_acquire_signal(args.flag, args.tag);
}
