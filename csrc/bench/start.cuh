// Ranks that start together, and the time from the start to the end of the work behind it on the stream.
#pragma once
#include "../protocol/deadline.h"

namespace moecomm::bench {

// moecomm_bench/start.py fills it.
struct StartArgs {
    u64 blocks[kMaxRanks];  // by rank: kStartWords words in its window, zero before the first start
    u64 times;              // u64[kTimes] of this rank
    u64 abort_here, abort_host;
    u64 timeout_ns;
    i32 rank, ranks;
};
static_assert(sizeof(StartArgs) == 8 * kMaxRanks + 40, "as start.py packs it");

// Words of a block. One rank writes each of them; its value is the number of the start.
enum StartWord : i32 { kPing, kGo, kArrived, kPong = kArrived + kMaxRanks, kStartWords = kPong + kMaxRanks };
// Words of `times`: starts so far, nanoseconds at the start and at the end, the outcome of waits (Waited), and the steps of the clock.
enum TimeWord : i32 { kStarts, kBegin, kEnd, kOutcome, kStep, kTimes };

MOECOMM_FN u64* start_word(const StartArgs& a, i32 rank, i32 which) { return reinterpret_cast<u64*>(a.blocks[rank]) + which; }
MOECOMM_FN u64* time_words(const StartArgs& a) { return reinterpret_cast<u64*>(a.times); }

// Wait until a word of this rank has the number of this start. Called by one thread. False on timeout or abort; kOutcome then has the
// reason.
MOECOMM_FN bool await_start(const StartArgs& a, i32 which, u64 number) {
    const Deadline deadline{a.timeout_ns, reinterpret_cast<const u32*>(a.abort_here), reinterpret_cast<const u32*>(a.abort_host)};
    const u64* word = start_word(a, a.rank, which);
    const Waited waited = wait_until(deadline, [&] { return load_acquire(word) >= number; });
    if (waited != Waited::ok) time_words(a)[kOutcome] = static_cast<u64>(waited);
    return waited == Waited::ok;
}

// Rank 0 waits for all others, measures how long a store to each of them takes (half a round trip), releases them, and holds for as long as
// the slowest store. Called by one thread.
MOECOMM_FN bool lead_start(const StartArgs& a, u64 number) {
    for (i32 peer = 1; peer < a.ranks; ++peer)
        if (!await_start(a, kArrived + peer, number)) return false;
    u32 flight = 0;
    for (i32 peer = 1; peer < a.ranks; ++peer) {
        const u32 begin = cycles();
        store_release(start_word(a, peer, kPing), number);
        if (!await_start(a, kPong + peer, number)) return false;
        flight = max(flight, (cycles() - begin) / 2);
    }
    for (i32 peer = 1; peer < a.ranks; ++peer) store_release(start_word(a, peer, kGo), number);
    for (const u32 begin = cycles(); cycles() - begin < flight;) {
    }
    return true;
}
MOECOMM_FN bool follow_start(const StartArgs& a, u64 number) {
    store_release(start_word(a, 0, kArrived + a.rank), number);
    if (!await_start(a, kPing, number)) return false;
    store_release(start_word(a, 0, kPong + a.rank), number);
    return await_start(a, kGo, number);
}

// Kernel body, called by all threads of one block: ends on all ranks within a fraction of a microsecond.
MOECOMM_FN void start(const StartArgs& a) {
    if (threadIdx.x != 0) return;
    u64* times = time_words(a);
    const u64 number = times[kStarts] + 1;
    times[kStarts] = number;
    if (a.rank == 0 ? lead_start(a, number) : follow_start(a, number)) times[kBegin] = now_ns();
}

// Kernel body, called by all threads of one block behind the work.
MOECOMM_FN void finish(const StartArgs& a) {
    if (threadIdx.x == 0) time_words(a)[kEnd] = now_ns();
}

// Kernel body, called by all threads of one block: the smallest step of the clock among 64.
MOECOMM_FN void clock_step(const StartArgs& a) {
    if (threadIdx.x != 0) return;
    u64 least = ~0ull, last = now_ns();
    for (i32 steps = 0; steps < 64;) {
        const u64 now = now_ns();
        if (now == last) continue;
        least = min(least, now - last);
        last = now;
        ++steps;
    }
    time_words(a)[kStep] = least;
}

}  // namespace moecomm::bench
