// Every byte offset of a window.  All ranks of a Buffer have the same Shape (checked at open), so all windows have the same layout.
#pragma once
#include "notice.h"
#include "signal.h"

namespace moecomm {

struct Shape {
    i32 ranks, experts, topk, max_tokens;
    i64 staged_row_bytes;  // bytes of the widest row that combine stages: the fp32 partial sum, and topk fp32 gradients of weights
    i64 heap_bytes;        // room for outputs
};

// A rank's own counters.  In device memory, so that a replayed graph counts on.
struct State {
    u32 round;                 // rounds finished
    u32 last_combine;          // the round of the last combine that staged rows, 0 if none
    u32 arrivals, generation;  // grid barrier
    u32 announced, finished;   // blocks of this launch that have
    u32 bad_entry;             // kernels: the first bad entry of this round's input, 0 if none
    u32 claim;                 // kernels: the last round with a failure that some thread has spoken for
};

struct WindowLayout {
    u64 abort;         // u32, its own line: any rank may set it
    u64 state;         // State
    u64 notices;       // Notice[2][ranks]: by round parity and sender.  Two are enough: a peer's notice of round n + 2 implies that it
                       // saw ours of round n + 1, which we sent after we had finished reading round n.
    u64 counts;        // i32[2][ranks][columns]: beside the notices; tokens per expert, then flat rows per rank
    u64 arrived;       // u64[ranks][chunks]: chunk_signal by source rank and chunk of its tokens
    u64 reduced;       // u64[ranks][chunks]: tag_signal by reducing rank and block of kMinChunk of our rows there, in token order
    u64 drained;       // u64[ranks]: tag_signal of the last combine whose staged rows that rank has read
    u64 chunk_counts;  // i32[columns][chunks]: scratch of our own counting
    u64 staging;       // [ranks * max_tokens] rows of staged_row_bytes
    u64 heap;          // outputs, handed out by runtime/arena
    u64 bytes;
    i32 columns;  // experts + ranks
    i32 chunks;   // ceil(max_tokens / kMinChunk)
};

MOECOMM_BOTH WindowLayout window_layout(const Shape& s) {
    constexpr u64 line = 256;
    WindowLayout w{};
    w.columns = s.experts + s.ranks;
    w.chunks = ceil_div(s.max_tokens > 0 ? s.max_tokens : 1, kMinChunk);
    const u64 ranks = s.ranks, columns = w.columns, chunks = w.chunks;
    u64 at = 0;
    auto take = [&](u64 bytes) {
        u64 here = at;
        at = align_up(at + bytes, line);
        return here;
    };
    w.abort = take(sizeof(u32));
    w.state = take(sizeof(State));
    w.notices = take(2 * ranks * sizeof(Notice));
    w.counts = take(2 * ranks * columns * sizeof(i32));
    w.arrived = take(ranks * chunks * sizeof(u64));
    w.reduced = take(ranks * chunks * sizeof(u64));
    w.drained = take(ranks * sizeof(u64));
    w.chunk_counts = take(columns * chunks * sizeof(i32));
    w.staging = take(ranks * static_cast<u64>(s.max_tokens) * static_cast<u64>(s.staged_row_bytes));
    w.heap = take(static_cast<u64>(s.heap_bytes));
    w.bytes = at;
    return w;
}

MOECOMM_BOTH constexpr u64 notice_at(const WindowLayout& w, i32 ranks, u32 round, i32 from) {
    return w.notices + ((round & 1) * static_cast<u64>(ranks) + from) * sizeof(Notice);
}
MOECOMM_BOTH constexpr u64 counts_at(const WindowLayout& w, i32 ranks, u32 round, i32 from) {
    return w.counts + ((round & 1) * static_cast<u64>(ranks) + from) * w.columns * sizeof(i32);
}
MOECOMM_BOTH constexpr u64 arrived_at(const WindowLayout& w, i32 from, i32 chunk) {
    return w.arrived + (static_cast<u64>(from) * w.chunks + chunk) * sizeof(u64);
}
MOECOMM_BOTH constexpr u64 reduced_at(const WindowLayout& w, i32 from, i32 block) {
    return w.reduced + (static_cast<u64>(from) * w.chunks + block) * sizeof(u64);
}
MOECOMM_BOTH constexpr u64 drained_at(const WindowLayout& w, i32 from) { return w.drained + static_cast<u64>(from) * sizeof(u64); }

}  // namespace moecomm
