// Mail (csrc/protocol/round_header.h): 32 bits and the tag of the round in one store, so that a word is whole when it is there.
#pragma once
#include "copy.cuh"
#include "wait.cuh"

namespace moecomm {

MOECOMM_FN u64 tagged_word(const Round& r, i32 from, i32 word) {
    return tagged_words_at(r.ctx.window, r.ctx.shape.ranks, r.tag, from) + word * sizeof(u64);
}

// By the threads [thread, thread + stride, ...) of a block: the words of `notice`, to a peer.
template <class Transport>
MOECOMM_FN void send_header(const Round& r, const Transport& transport, i32 peer, const RoundHeader& header, i32 thread, i32 stride) {
    const auto* words = reinterpret_cast<const u32*>(&header);
    for (i32 i = thread; i < kHeaderWords; i += stride) transport.post(peer, tagged_word(r, r.ctx.rank, i), word_signal(r.tag, words[i]));
}

// `n` words of mail, `stride` bytes apart, loaded together: take(nth, word) in order.  False when one did not come, of rank from(nth);
// stop(which is late) true: nobody waits any more, and nothing is taken.  Words say all by themselves, so nothing is acquired with them.
template <class From, class Stop, class Take>
MOECOMM_FN bool await_words(const Round& r, u64 first, i64 stride, i32 n, From from, Stop stop, Take take) {
    constexpr i32 kBatch = 8;
    for (i32 base = 0; base < n; base += kBatch) {
        u64 seen[kBatch];
        i32 missing_peer = 0;
        bool stopped = false;
        const auto ready = [&] {
            missing_peer = -1;
#pragma unroll
            for (i32 i = 0; i < kBatch; ++i)
                if (base + i < n) seen[i] = load_relaxed(own<const u64>(r.ctx, first + (base + i) * stride));
#pragma unroll
            for (i32 i = kBatch - 1; i >= 0; --i)
                if (base + i < n && signal_tag(seen[i]) != r.tag) missing_peer = base + i;
            stopped = missing_peer >= 0 && stop(missing_peer);
            return missing_peer < 0 || stopped;
        };
        if (!wait_for_any(r, Phase::header, [&] { return from(missing_peer); }, r.tag, ready, [] { return 0ll; })) return false;
        if (stopped) return true;
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i)
            if (base + i < n) take(base + i, signal_word(seen[i]));
    }
    return true;
}

// By the threads of a block, or of a part of it: all words of everybody's notice into `notices`.  False in a thread whose word did not
// come.
MOECOMM_FN bool await_headers(const Round& r, RoundHeader* headers, i32 thread, i32 stride) {
    bool came = true;
    for (i32 i = thread; came && i < r.ctx.shape.ranks * kHeaderWords; i += stride) {
        const i32 from = i / kHeaderWords, word = i % kHeaderWords;
        u64 seen = 0;
        came = wait_word(r, Phase::header, from, tagged_word(r, from, word), r.tag, seen);
        reinterpret_cast<u32*>(headers + from)[word] = signal_word(seen);
    }
    return came;
}

// Has `from` sent a notice of another call than ours?  Then the rest of its mail may never come.
MOECOMM_FN bool calls_otherwise(const Round& r, i32 from, const RoundHeader& mine) {
    const auto* words = own<const u64>(r.ctx, tagged_word(r, from, 0));
    const u64 op = load_relaxed(words + kOpWord), low = load_relaxed(words + kCallWord), high = load_relaxed(words + kCallWord + 1);
    if (signal_tag(op) != r.tag || signal_tag(low) != r.tag || signal_tag(high) != r.tag) return false;
    return signal_word(op) != reinterpret_cast<const u32*>(&mine)[kOpWord] ||
           (static_cast<u64>(signal_word(high)) << 32 | signal_word(low)) != mine.call;
}

}  // namespace moecomm
