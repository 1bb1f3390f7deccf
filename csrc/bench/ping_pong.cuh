// Ping-pong latency: two ranks take turns to put bytes into each other's window, with a signal after them. Half a round trip is the
// latency.
#pragma once
#include "../device/bulk.cuh"
#include "../protocol/deadline.h"

namespace moecomm::bench {

// moecomm_bench/latency.py fills it.
struct PingPongArgs {
    u64 here, there;  // block in this rank's window and in the peer's: the signal, and the payload from kPayload bytes on
    u64 source;       // the payload: `bytes` in this rank's memory, 16-byte aligned
    u64 abort_here, abort_host;
    u64 timeout_ns;
    u64 result;  // u64[2]: nanoseconds of the timed round trips, and the outcome (Waited)
    u64 before;  // initial value of the signal
    i64 bytes;
    i32 warmup, rounds;  // round trips
    i32 starts;
    i32 pad;
    // For puts through a library: this rank's window, which holds `here` and `source`; Context::link; the signal to add to.
    u64 window, link, which;
};
static_assert(sizeof(PingPongArgs) == 112, "as latency.py packs it");

constexpr i32 kPayload = 256;
constexpr i32 kPutPiece = 8192, kPutSlots = 4;  // of a warp's ring

MOECOMM_FN void count_release(u64* counter) { asm volatile("red.release.sys.global.add.u64 [%0], 1;" ::"l"(counter) : "memory"); }

// Copy few bytes. Called by all threads of the grid.
MOECOMM_FN void put_vectors(const PingPongArgs& a) {
    const i64 threads = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x, vectors = a.bytes / 16;
    const auto* from = reinterpret_cast<const u8*>(a.source);
    auto* to = reinterpret_cast<u8*>(a.there + kPayload);
    for (i64 i = thread; i < vectors; i += threads) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    for (i64 i = vectors * 16 + thread; i < a.bytes; i += threads) to[i] = from[i];
}

// Ring of a warp that moves bulk copies. `loads`: loads into the ring so far, over all rounds.
struct Mover {
    u8* ring;
    u64* loaded;
    i64 loads;
};

// Copy many bytes (a multiple of 16). Called by one lane of each warp; returns when the bytes are written.
MOECOMM_FN void put_bulk(const PingPongArgs& a, Mover& m) {
    const i64 movers = gridDim.x * (blockDim.x / kWarp), mover = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    const i64 pieces = ceil_div<i64>(a.bytes, kPutPiece), steps = mover < pieces ? ceil_div(pieces - mover, movers) : 0;
    const auto offset = [&](i64 step) { return (mover + step * movers) * kPutPiece; };
    const auto size = [&](i64 step) { return static_cast<i32>(min(static_cast<i64>(kPutPiece), a.bytes - offset(step))); };
    constexpr i32 ahead = kPutSlots - 1;
    for (i64 step = 0; step < steps + ahead; ++step) {
        if (step < steps) {
            if (step >= kPutSlots) bulk_wait_read<0>();
            const i32 slot = static_cast<i32>((m.loads + step) % kPutSlots);
            bulk_load(m.ring + slot * kPutPiece, reinterpret_cast<const u8*>(a.source) + offset(step), size(step), m.loaded + slot);
        }
        if (const i64 ready = step - ahead; ready >= 0) {
            const i32 slot = static_cast<i32>((m.loads + ready) % kPutSlots);
            copy_wait(m.loaded + slot, static_cast<u32>((m.loads + ready) / kPutSlots) & 1);
            bulk_store(reinterpret_cast<u8*>(a.there + kPayload) + offset(ready), m.ring + slot * kPutPiece, size(ready));
            bulk_commit();
        }
    }
    m.loads += steps;
    bulk_wait<0>();
}

// Put by loads and stores. Every thread calls `Bytes`, which moves the payload.
template <class Bytes>
struct Near {
    const PingPongArgs& a;
    Bytes bytes;

    MOECOMM_FN bool put() {
        bytes();
        return true;
    }
    // Called by one thread of a block after all of its bytes are issued; the peer waits for the signals of all blocks. A release.
    MOECOMM_FN void signal(i64 round) const {
        auto* flag = reinterpret_cast<u64*>(a.there);
        if (gridDim.x == 1) {
            store_release(flag, a.before + round + 1);  // a store is faster than an addition
        } else {
            count_release(flag);
        }
    }
    MOECOMM_FN u64 signals() const { return load_acquire(reinterpret_cast<const u64*>(a.here)); }
};

MOECOMM_FN Deadline deadline_of(const PingPongArgs& a) {
    return {a.timeout_ns, reinterpret_cast<const u32*>(a.abort_here), reinterpret_cast<const u32*>(a.abort_host)};
}
MOECOMM_FN void give_up(const PingPongArgs& a, Waited why) { reinterpret_cast<u64*>(a.result)[1] = static_cast<u64>(why); }

// Wait for the peer's put of this round. Called by all threads of a block. False on timeout or abort; `result` then has the reason.
template <class Way>
MOECOMM_FN bool await_peer(const PingPongArgs& a, const Way& way, i64 round) {
    bool failed = false;
    if (threadIdx.x == 0) {
        const u64 wanted = a.before + (round + 1) * gridDim.x;
        const Waited waited = wait_until(deadline_of(a), [&] { return way.signals() >= wanted; });
        failed = waited != Waited::ok;
        if (failed) give_up(a, waited);
    }
    return !__syncthreads_or(failed);
}

// Run the round trips. Called by all threads of the grid. `way.put` moves the payload and `way.signal` releases it after a block barrier.
// Returns early if a wait fails; `result` then has the reason.
template <class Way>
MOECOMM_FN void alternate(const PingPongArgs& a, Way way) {
    u64 start = 0;
    for (i64 round = 0; round < a.warmup + a.rounds; ++round) {
        if (round == a.warmup) start = now_ns();
        if (!a.starts && !await_peer(a, way, round)) return;
        const bool put = way.put();
        __syncwarp();
        if (__syncthreads_or(!put)) return;
        if (threadIdx.x == 0) way.signal(round);
        if (a.starts && !await_peer(a, way, round)) return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) reinterpret_cast<u64*>(a.result)[0] = now_ns() - start;
}
template <class Bytes>
MOECOMM_FN void alternate_loads(const PingPongArgs& a, Bytes bytes) {
    alternate(a, Near<Bytes>{a, bytes});
}

// Kernel body, called by all threads.
template <bool bulk>
MOECOMM_FN void ping_pong(const PingPongArgs& a) {
    extern __shared__ __align__(128) u8 shared[];
    const i32 warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    Mover mover{shared + warp * kPutSlots * kPutPiece, reinterpret_cast<u64*>(shared + warps * kPutSlots * kPutPiece) + warp * kPutSlots,
                0};
    const bool moves = threadIdx.x % kWarp == 0;
    if (bulk && moves) {
        for (i32 slot = 0; slot < kPutSlots; ++slot) barrier_init(mover.loaded + slot, 1);
        barrier_init_done();
    }
    alternate_loads(a, [&] {
        if (!bulk) put_vectors(a);
        if (bulk && moves) put_bulk(a, mover);
    });
}

}  // namespace moecomm::bench
