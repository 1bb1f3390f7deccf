// Tagged words (csrc/protocol/round_header.h) in kernels: one store writes 32 bits and the tag of the round, so that a word with the tag is
// complete.
#pragma once
#include "lanes.cuh"
#include "wait.cuh"

namespace moecomm {

MOECOMM_FN u64 tagged_word(const Round& r, i32 from, i32 word) {
    return tagged_words_at(r.ctx.window, r.ctx.shape.ranks, r.tag, from) + word * sizeof(u64);
}

// Send the words of `header` to a peer. Called by threads [thread, thread + stride, ...) of a block. Unordered stores; cannot fail.
template <class Transport>
MOECOMM_FN void send_header(const Round& r, const Transport& transport, i32 peer, const RoundHeader& header, i32 thread, i32 stride) {
    const auto* words = reinterpret_cast<const u32*>(&header);
    for (i32 i = thread; i < kHeaderWords; i += stride) transport.post(peer, tagged_word(r, r.ctx.rank, i), word_signal(r.tag, words[i]));
}

// Answer for the masked ranks: store the tagged words of each, as if it had called like this rank and had no tokens. Called by threads
// [first, first + stride) of one block; not inlined, so that rounds without a mask need no registers for it. Relaxed stores; cannot fail.
template <i32 first, i32 stride>
__device__ __noinline__ void answer_for_masked(const Context& ctx, u32 tag, const RoundHeader& mine) {
    const u64 masked = own_mask(ctx).ranks[0];
    for (i32 rank = 0; rank < ctx.shape.ranks; ++rank) {
        if (!is_in(masked, rank)) continue;
        u64* const here = own<u64>(ctx, tagged_words_at(ctx.window, ctx.shape.ranks, tag, rank));
        for (i32 i = static_cast<i32>(threadIdx.x) - first; i < ctx.window.num_tagged_words; i += stride) {
            const bool of_call = i < kHeaderWords && i != kStatusWord && i != kTokensWord;
            store_relaxed(&here[i], word_signal(tag, of_call ? reinterpret_cast<const u32*>(&mine)[i] : 0));
        }
    }
}

// Wait for `n` tagged words, those at the offsets at(nth), and call take(nth, word) for each, in order. Called by one thread. Relaxed
// loads: a word acquires nothing beyond itself. False on timeout or abort, with rank from(nth) in the failure record; true without the rest
// if stop(missing_word) is true. Loads of a batch are in flight at the same time.
template <i32 kBatch, class At, class From, class Stop, class Take>
MOECOMM_FN bool await_words(const Round& r, Phase phase, i32 n, At at, From from, Stop stop, Take take) {
    for (i32 base = 0; base < n; base += kBatch) {
        u64 seen[kBatch];
        i32 missing_word = 0;
        bool stopped = false;
        const auto ready = [&] {
            u32 differ = 0;
#pragma unroll
            for (i32 i = 0; i < kBatch; ++i)
                if (base + i < n) seen[i] = load_relaxed(own<const u64>(r.ctx, at(base + i)));
#pragma unroll
            for (i32 i = 0; i < kBatch; ++i)
                if (base + i < n) differ |= signal_tag(seen[i]) ^ r.tag;
            if (differ == 0) return true;
#pragma unroll
            for (i32 i = kBatch - 1; i >= 0; --i)
                if (base + i < n && signal_tag(seen[i]) != r.tag) missing_word = base + i;
            stopped = stop(missing_word);
            return stopped;
        };
        if (!wait_for_any(r, phase, [&] { return from(missing_word); }, r.tag, ready, [] { return 0ll; })) return false;
        if (stopped) return true;
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i)
            if (base + i < n) take(base + i, signal_word(seen[i]));
    }
    return true;
}

// Count the wait for the header of a peer, once a look at its words was in vain. Called by one thread of the rank for each peer. Does not
// report a failure: the threads that wait for the peer's other words do, and the caller waits for all words afterwards.
MOECOMM_FN void time_header(const Round& r, i32 peer) {
    timed_wait(r.ctx, r.tag, peer, own<const u64>(r.ctx, tagged_word(r, peer, 0)), Counter::wait_header);
}

// Copy the headers of all ranks into `headers`. Called by threads [thread, thread + stride, ...) of a block; relaxed loads, so a block
// barrier follows. False in a thread whose word did not arrive; the failure record is then filled. With `times`, waits are counted.
template <bool times>
MOECOMM_FN bool await_headers(const Round& r, RoundHeader* headers, i32 thread, i32 stride) {
    const i32 words = r.ctx.shape.ranks * kHeaderWords, n = thread < words ? ceil_div(words - thread, stride) : 0;
    const auto from = [&](i32 nth) { return (thread + nth * stride) / kHeaderWords; };
    const auto word = [&](i32 nth) { return (thread + nth * stride) % kHeaderWords; };
    i32 polls = 0;
    const auto count_wait = [&](i32) {
        if (times && ++polls == 1 && blockIdx.x == 0 && thread < r.ctx.shape.ranks) time_header(r, thread);
        return false;
    };
    return await_words<4>(
        r, Phase::header, n, [&](i32 nth) { return tagged_word(r, from(nth), word(nth)); }, from, count_wait,
        [&](i32 nth, u32 value) { reinterpret_cast<u32*>(headers + from(nth))[word(nth)] = value; });
}

// True if `from` has sent the header of another call than this rank's; the rest of its tagged words may then never come. Called by one
// thread; relaxed.
MOECOMM_FN bool call_differs(const Round& r, i32 from, const RoundHeader& mine) {
    const auto* words = own<const u64>(r.ctx, tagged_word(r, from, 0));
    const u64 op = load_relaxed(words + kOpWord), low = load_relaxed(words + kCallWord), high = load_relaxed(words + kCallWord + 1);
    if (signal_tag(op) != r.tag || signal_tag(low) != r.tag || signal_tag(high) != r.tag) return false;
    return signal_word(op) != reinterpret_cast<const u32*>(&mine)[kOpWord] ||
           (static_cast<u64>(signal_word(high)) << 32 | signal_word(low)) != mine.call;
}

}  // namespace moecomm
