// A Window: symmetric memory of the ranks of a group, with signals and a barrier. The struct is the handle that a kernel, or the code of a
// CPU rank, gets by value. All ranks have the same numbers in it, except `rank` and the addresses.
//
// The control words of a rank (signals, barriers and words for failures) follow the user's `nbytes` in the same memory, or have memory of
// their own where a Window has adopted the user's.
//
// Every function says who calls it, what it orders and how it fails. `Coop` is CoopThread (any thread for itself), CoopWarp (all lanes of a
// warp) or CoopBlock (all threads of a block); all of them pass the same arguments. A wait fails at the deadline, when a rank has aborted,
// or when the peer that it waits for has ended or left. The first failed wait of a rank fills its failure record and sets the abort words
// of all ranks, which end their waits too; from then on the Window can only be closed.
#pragma once
#include "../protocol/deadline.h"
#include "../protocol/record.h"

#if MOECOMM_DEVICE
#define MOECOMM_RARE static __device__ __noinline__
#else
#define MOECOMM_RARE static inline
#endif

namespace moecomm {

constexpr i32 kBarrierSlots = kMaxBlocks;    // of kernels: block b of every rank can use slot b
constexpr i32 kHostBarrier = kBarrierSlots;  // the slot of barriers that Python asks for
constexpr i32 kMaxSignals = 1 << 16;

// Counters of a rank, zero when the Window opens.
struct WindowState {
    u32 claim;  // 1: a wait has failed, and some thread reports it
    u32 pad[31];
};

// One thread, for itself.
struct CoopThread {
    MOECOMM_FN i32 index() const { return 0; }
    MOECOMM_FN i32 size() const { return 1; }
    MOECOMM_FN void sync() const {}                        // what its threads wrote before, all of them see after
    MOECOMM_FN bool any(bool here) const { return here; }  // likewise; whether `here` is true for any of them
};

struct Window {
    u64 peers;       // u64[ranks]: address of every rank's memory, as this rank reaches it
    u64 control;     // u64[ranks]: likewise of the memory with every rank's control words; `peers` unless the Window has adopted memory
    u64 record;      // FailureRecord*, host-visible
    u64 abort_host;  // u32*, host-writable
    u64 timeout_ns;
    u64 nbytes;  // of the user, on each rank
    // Offsets in the memory that `control` points to, which are the same on every rank.
    u64 abort;     // u32: any rank may set it
    u64 state;     // WindowState
    u64 left;      // u32[ranks]: 1 once that rank has closed its Window; everything that it stored here came before
    u64 barriers;  // u64[kBarrierSlots + 1][ranks]: barriers of the slot that a rank has come to
    u64 signals;   // u64[num_signals]
    u64 bytes;     // of the memory that `control` points to
    i32 rank, ranks, num_signals, pad;

    // The address of byte `offset` of this rank's memory. Called by any thread; cannot fail.
    template <class T = void>
    MOECOMM_FN T* local(u64 offset = 0) const {
        return peer<T>(rank, offset);
    }
    // Likewise of any rank's memory.
    template <class T = void>
    MOECOMM_FN T* peer(i32 of, u64 offset = 0) const {
        return reinterpret_cast<T*>(reinterpret_cast<const u64*>(peers)[of] + offset);
    }

    // Store `bytes` from `from`, any memory that its threads see, to byte `to` of a rank's memory: by vectors of 16 bytes if both ends are
    // aligned so, else by words or bytes. Any Coop; cannot fail. A signal that one of its threads raises afterwards covers the bytes.
    template <class Coop>
    MOECOMM_FN void put(Coop coop, i32 to_rank, u64 to, const void* from, u64 bytes) const {
        copy(coop, peer<u8>(to_rank, to), static_cast<const u8*>(from), bytes);
        coop.sync();
    }
    // put, then signal by one of the threads.
    template <class Coop>
    MOECOMM_FN void put_signal(Coop coop, i32 to_rank, u64 to, const void* from, u64 bytes, i32 index, u64 amount) const {
        put(coop, to_rank, to, from, bytes);
        if (coop.index() == 0) signal(to_rank, index, amount);
    }

    // Add to a signal of a rank. Called by one thread; cannot fail. Release: covers all that this thread has written or acquired, and what
    // other threads had before a barrier with it.
    MOECOMM_FN void signal(i32 to_rank, i32 index, u64 amount = 1) const {
        add_release(control_word<u64>(to_rank, signal_at(index)), amount);
    }
    // Store a signal of a rank. Otherwise as signal().
    MOECOMM_FN void set_signal(i32 to_rank, i32 index, u64 value) const {
        store_release(control_word<u64>(to_rank, signal_at(index)), value);
    }
    // Load a signal of this rank. Called by one thread; cannot fail. Acquire.
    MOECOMM_FN u64 signal_value(i32 index) const { return load_acquire(control_word<const u64>(rank, signal_at(index))); }

    // Wait until a signal of this rank is at least `value`. `from`: the rank that will raise it, or -1; a wait that names it ends as soon
    // as that rank has left. Any Coop. Acquire, for all its threads. False on failure, for all its threads.
    template <class Coop>
    MOECOMM_FN bool wait(Coop coop, i32 index, u64 value, i32 from = -1) const {
        bool failed = false;
        if (coop.index() == 0) failed = !await(control_word<const u64>(rank, signal_at(index)), value, Phase::signal, from, index);
        return !coop.any(failed);
    }

    // Wait until all ranks have come to this barrier of the slot, 0 to kBarrierSlots - 1. Slots are independent; one group of threads of a
    // rank uses a slot at a time. Any Coop. Release and acquire, for all its threads. False on failure, for all its threads.
    template <class Coop>
    MOECOMM_FN bool barrier(Coop coop, i32 slot = 0) const {
        const u64 number = load_relaxed(control_word<const u64>(rank, barrier_at(slot, rank))) + 1;
        coop.sync();  // all have read the number, and their writes are covered by the stores that follow
        for (i32 step = coop.index(); step < ranks; step += coop.size())
            store_release(control_word<u64>((rank + 1 + step) % ranks, barrier_at(slot, rank)), number);
        bool failed = false;
        for (i32 step = coop.index(); step < ranks && !failed; step += coop.size()) {
            const i32 other = (rank + 1 + step) % ranks;
            failed = !await(control_word<const u64>(rank, barrier_at(slot, other)), number, Phase::barrier, other, slot);
        }
        return !coop.any(failed);
    }

    // Tell every peer that this rank has left. Called by one thread; cannot fail. Release.
    MOECOMM_FN void leave() const {
        for (i32 other = 0; other < ranks; ++other) store_release(control_word<u32>(other, left_at(rank)), 1);
    }

    MOECOMM_BOTH constexpr u64 signal_at(i32 index) const { return signals + static_cast<u64>(index) * sizeof(u64); }
    MOECOMM_BOTH constexpr u64 left_at(i32 of) const { return left + static_cast<u64>(of) * sizeof(u32); }
    MOECOMM_BOTH constexpr u64 barrier_at(i32 slot, i32 from) const {
        return barriers + (static_cast<u64>(slot) * ranks + from) * sizeof(u64);
    }

    // The address of a control word of a rank. Called by any thread; cannot fail.
    template <class T>
    MOECOMM_FN T* control_word(i32 of, u64 offset) const {
        return reinterpret_cast<T*>(reinterpret_cast<const u64*>(control)[of] + offset);
    }

    // Report a failed wait. Called by any thread; only the first of a rank has an effect. `cause`: an abort word; 0: that of this rank,
    // which another rank or the host has set. The handle is passed by value, so that callers keep theirs in registers.
    MOECOMM_RARE void report(Window w, u32 cause, Phase phase, i32 which, u64 least, u64 seen, u64 waited_ns) {
        if (compare_exchange(w.control_word<u32>(w.rank, w.state), 0, 1) != 0) return;
        if (cause == 0) cause = load_relaxed(w.control_word<const u32>(w.rank, w.abort));
        if (cause == 0) cause = load_relaxed(reinterpret_cast<const u32*>(w.abort_host));
        FailureRecord failure{};
        failure.code = static_cast<u32>(abort_cause(cause));
        failure.op = static_cast<u32>(Op::window);
        failure.phase = static_cast<u32>(phase);
        failure.rank = w.rank;
        failure.peer = abort_culprit(cause);
        failure.round = static_cast<u32>(which);
        failure.expected = static_cast<i64>(least);
        failure.seen = static_cast<i64>(seen);
        failure.waited_ns = waited_ns;
        leave_record(reinterpret_cast<FailureRecord*>(w.record), failure);
        for (i32 other = 0; other < w.ranks; ++other) compare_exchange(w.control_word<u32>(other, w.abort), 0, cause);
    }

  private:
    struct alignas(16) Vector {
        u64 words[2];
    };

    template <class T, class Coop>
    MOECOMM_FN static void copy_as(Coop coop, u8* to, const u8* from, u64 count) {
        constexpr u64 kBatch = 4;  // loads of a thread in flight
        auto* there = reinterpret_cast<T*>(to);
        const auto* here = reinterpret_cast<const T*>(from);
        const u64 step = coop.size();
        u64 i = coop.index();
        for (; i + (kBatch - 1) * step < count; i += kBatch * step) {
            T part[kBatch];
            for (u64 n = 0; n < kBatch; ++n) part[n] = here[i + n * step];
            for (u64 n = 0; n < kBatch; ++n) there[i + n * step] = part[n];
        }
        for (; i < count; i += step) there[i] = here[i];
    }
    template <class Coop>
    MOECOMM_FN static void copy(Coop coop, u8* to, const u8* from, u64 bytes) {
        const u64 ends = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from);
        if (ends % sizeof(Vector) == 0) {
            const u64 whole = bytes / sizeof(Vector), done = whole * sizeof(Vector);
            copy_as<Vector>(coop, to, from, whole);
            copy_as<u8>(coop, to + done, from + done, bytes - done);
        } else if ((ends | bytes) % sizeof(u32) == 0) {
            copy_as<u32>(coop, to, from, bytes / sizeof(u32));
        } else {
            copy_as<u8>(coop, to, from, bytes);
        }
    }
#if !MOECOMM_DEVICE
    static void copy(CoopThread, u8* to, const u8* from, u64 bytes) { __builtin_memcpy(to, from, bytes); }
#endif

    MOECOMM_FN Deadline deadline() const {
        return {timeout_ns, control_word<const u32>(rank, abort), reinterpret_cast<const u32*>(abort_host)};
    }

    // Called by one thread. Acquire. On failure reports it and returns false.
    MOECOMM_FN bool await(const u64* word, u64 least, Phase phase, i32 from, i32 which) const {
        u64 seen = load_acquire(word);
        if (seen >= least) return true;
        const u32* gone = from >= 0 && from != rank ? control_word<const u32>(rank, left_at(from)) : nullptr;
        const Deadline limit = deadline();
        // Relaxed, because each acquiring load invalidates L1, which other warps may use.
        const Waited waited = wait_until(limit, [&] {
            seen = load_relaxed(word);
            return seen >= least || (gone != nullptr && load_relaxed(gone) != 0);
        });
        if (waited == Waited::ok) {
            if (gone != nullptr) static_cast<void>(load_acquire(gone));  // before the word: what the peer stored before it left is there
            seen = load_acquire(word);
            if (seen >= least) return true;
        }
        const u32 cause = waited == Waited::aborted ? 0 : abort_word(waited == Waited::ok ? Failure::peer_lost : Failure::timeout, from);
        report(*this, cause, phase, which, least, seen, waited == Waited::timeout ? timeout_ns : 0);
        return false;
    }
};
static_assert(sizeof(WindowState) == 128, "its own line");

// Fill in the offsets, for `nbytes` of the user on each rank, which are in other memory if they are adopted.
MOECOMM_BOTH void lay_out(Window& w, i32 rank, i32 ranks, i32 num_signals, u64 nbytes, bool adopted = false) {
    constexpr u64 line = 128;
    w.rank = rank, w.ranks = ranks, w.num_signals = num_signals, w.nbytes = nbytes;
    u64 at = adopted ? 0 : align_up<u64>(nbytes, 256);
    auto take = [&](u64 bytes) {
        const u64 here = at;
        at = align_up(at + bytes, line);
        return here;
    };
    w.abort = take(sizeof(u32));
    w.state = take(sizeof(WindowState));
    w.left = take(ranks * sizeof(u32));
    w.barriers = take((kBarrierSlots + 1) * static_cast<u64>(ranks) * sizeof(u64));
    w.signals = take(static_cast<u64>(num_signals) * sizeof(u64));
    w.bytes = at;
}

}  // namespace moecomm
