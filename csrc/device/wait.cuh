// Bounded waits for peers, and the failure record they leave (csrc/protocol/deadline.h in kernels).
#pragma once
#include "../protocol/counters.h"
#include "../protocol/deadline.h"
#include "config.cuh"

namespace moecomm {

// The round that a thread works for.
struct Round {
    const Context& ctx;
    Op op;
    u32 tag;
};

template <class T>
MOECOMM_FN T* own(const Context& ctx, u64 offset) {
    return reinterpret_cast<T*>(ctx.peers[ctx.rank] + offset);
}
MOECOMM_FN State* own_state(const Context& ctx) { return own<State>(ctx, ctx.window.state); }
// A rank answers for the ranks that are masked: it stores in its own window what such a rank would send, had it no tokens. So no wait has
// to know of masks. No rows go to these ranks: ids of their experts have been replaced before the round.
MOECOMM_FN const Mask& own_mask(const Context& ctx) { return *own<const Mask>(ctx, mask_at(ctx.window)); }
static_assert(kMaxRanks <= 64, "kernels read the first word of Mask::ranks");
MOECOMM_FN bool is_in(u64 ranks, i32 rank) { return (ranks >> rank & 1) != 0; }

MOECOMM_FN Deadline deadline_of(const Context& ctx) {
    const u32* here = own<const u32>(ctx, ctx.window.abort);
    return {ctx.timeout_ns, here, ctx.abort_host != 0 ? reinterpret_cast<const u32*>(ctx.abort_host) : here};
}

// Fill the record unless it holds an earlier failure. Called by the one thread that claim_record has chosen. The code is stored last, with
// release, so that the host reads a complete record or none.
MOECOMM_FN void write_record(const Round& r, Phase phase, const ValidationResult& v, u64 waited_ns) {
    auto* record = reinterpret_cast<FailureRecord*>(r.ctx.record);
    if (load_relaxed(&record->code) != 0) return;
    record->op = static_cast<u32>(r.op);
    record->phase = static_cast<u32>(phase);
    record->argument = static_cast<u32>(v.argument);
    record->rank = r.ctx.rank;
    record->peer = v.peer;
    record->round = round_number(r.tag);
    record->expected = v.expected;
    record->seen = v.seen;
    record->waited_ns = waited_ns;
    store_release(&record->code, static_cast<u32>(v.failure));
}

// True in exactly one thread of the grid in this round, which then reports. Called by any thread; relaxed compare-and-swap.
MOECOMM_FN bool claim_record(const Round& r) {
    u32* claim = &own_state(r.ctx)->claim;
    const u32 held = load_relaxed(claim);
    return held != r.tag && compare_exchange(claim, held, r.tag) == held;
}

// Report why the headers make the round invalid. Called by any thread; reported once. Sets no abort word: every rank reaches the same
// result. After peer_lost and Argument::rejected, Python ends the Buffer.
MOECOMM_FN void report_invalid(const Round& r, const ValidationResult& v) {
    if (claim_record(r)) write_record(r, Phase::header, v, 0);
}

// Report a failed wait: fill the record and set the abort words of this rank and of all reachable peers, which ends all other waits. Called
// by any thread; only the first of a round has an effect.
__device__ __noinline__ void report_failure(Round r, Waited waited, Phase phase, i32 peer, i64 expected, i64 seen, u64 waited_ns) {
    if (!claim_record(r)) return;
    const Deadline d = deadline_of(r.ctx);
    u32 word = abort_word(Failure::timeout, peer);
    if (waited == Waited::aborted) {
        word = load_relaxed(d.abort_here);
        if (word == 0) word = load_relaxed(d.abort_host);
    }
    write_record(r, phase, {abort_cause(word), Argument::none, abort_culprit(word), expected, seen}, waited_ns);
    for (i32 p = 0; p < r.ctx.shape.ranks; ++p)  // not if others have masked this rank: they go on
        if (r.ctx.peers[p] != 0 && abort_cause(word) != Failure::excluded)
            compare_exchange(reinterpret_cast<u32*>(r.ctx.peers[p] + r.ctx.window.abort), 0, word);
}

// Extra time of a wait for other threads of this rank. Those threads wait for peers themselves, and the thread whose peer is missing must
// report first. Both check the clock every kCheckCycles.
constexpr u64 kOwnThreadsNs = 100'000'000;

// One thread polls `ready()`; the order is that of its loads. On timeout or abort, report whom(), `phase`, `expected` and seen(), and
// return false.
template <class Whom, class Ready, class Seen>
MOECOMM_FN bool wait_for_any(const Round& r, Phase phase, Whom whom, i64 expected, Ready ready, Seen seen) {
    Deadline deadline = deadline_of(r.ctx);
    if (phase == Phase::grid) deadline.timeout_ns += kOwnThreadsNs;
    const Waited waited = wait_until(deadline, ready);
    if (waited == Waited::ok) return true;
    report_failure(r, waited, phase, whom(), expected, seen(), waited == Waited::timeout ? deadline.timeout_ns : 0);
    return false;
}
// wait_for_any for a known peer.
template <class Ready, class Seen>
MOECOMM_FN bool wait_for(const Round& r, Phase phase, i32 peer, i64 expected, Ready ready, Seen seen) {
    return wait_for_any(r, phase, [&] { return peer; }, expected, ready, seen);
}

// Add to a counter of this rank for `peer`. Called by any thread; relaxed; cannot fail.
MOECOMM_FN void add_counter(const Context& ctx, Counter which, i32 peer, u64 n) {
    add_relaxed(own<u64>(ctx, counter_at(ctx.window, ctx.shape, which, peer)), n);
}

// Wait until `word` carries the round's tag, and count the time as a wait for `peer` (counters.h). Called by one thread of the rank for a
// peer at a time, once it has looked for the word in vain: it is not inlined, so that a word that is there costs nothing, and calls
// nothing, so that no register is saved. Relaxed. On timeout or abort returns the reason; the caller reports it.
__device__ __noinline__ Waited timed_wait(const Context& ctx, u32 tag, i32 peer, const u64* word, Counter which) {
    const auto ready = [&] { return signal_tag(load_relaxed(word)) == tag; };
    if (ready()) return Waited::ok;
    const u64 begun = now_ns();
    const Waited waited = wait_until(deadline_of(ctx), ready);
    if (peer != ctx.rank) add_counter(ctx, which, peer, now_ns() - begun);
    return waited;
}
// timed_wait that reports a failure. Called by one thread.
MOECOMM_FN bool counted_wait(const Round& r, Phase phase, i32 peer, const u64* word, Counter which) {
    const Waited waited = timed_wait(r.ctx, r.tag, peer, word, which);
    if (waited == Waited::ok) return true;
    const u64 waited_ns = waited == Waited::timeout ? r.ctx.timeout_ns : 0;
    report_failure(r, waited, phase, peer, r.tag, static_cast<i64>(signal_tag(load_relaxed(word))), waited_ns);
    return false;
}

// Wait until the word at `offset` of this rank's window carries `tag`; `value` is the word. Called by one thread. Relaxed: nothing written
// before the word may be read on account of it. False on timeout or abort; the failure record is then filled.
MOECOMM_FN bool wait_word(const Round& r, Phase phase, i32 peer, u64 offset, u32 tag, u64& value) {
    const u64* word = own<const u64>(r.ctx, offset);
    return wait_for(
        r, phase, peer, tag,
        [&] {
            value = load_relaxed(word);
            return signal_tag(value) == tag;
        },
        [&] { return static_cast<i64>(signal_tag(value)); });
}
// wait_word with acquire: this thread, and others after a barrier with it, may read what the peer wrote before the flag. The acquiring load
// follows once the flag is there, because each one invalidates L1, through which other warps move rows.
MOECOMM_FN bool wait_flag(const Round& r, Phase phase, i32 peer, u64 offset, u32 tag, u64& value) {
    const u64* flag = own<const u64>(r.ctx, offset);
    value = load_acquire(flag);
    if (signal_tag(value) == tag) return true;
    if (!wait_word(r, phase, peer, offset, tag, value)) return false;
    value = load_acquire(flag);
    return true;
}

// wait_flag for the tag of the round. If times() is true, in one thread of the rank for a peer, the wait is counted.
template <class Times>
MOECOMM_FN bool wait_flag(const Round& r, Phase phase, i32 peer, u64 offset, u64& value, Counter which, Times times) {
    const u64* flag = own<const u64>(r.ctx, offset);
    value = load_acquire(flag);
    if (signal_tag(value) == r.tag) return true;
    if (!(times() ? counted_wait(r, phase, peer, flag, which) : wait_word(r, phase, peer, offset, r.tag, value))) return false;
    value = load_acquire(flag);
    return true;
}

}  // namespace moecomm
