// Failure record of a round: which rank waited for which peer, in which phase of which round. 64 bytes in host-readable memory.
#pragma once
#include "order.h"

namespace moecomm {

enum class Failure : u32 {
    none = 0,
    timeout = 1,    // `peer` did not do `phase` in time
    peer_lost = 2,  // `peer` is known to be dead (a survivor's watcher wrote it to the abort word)
    aborted = 3,    // Buffer.abort() was called
    bad_input = 4,  // `peer` passed a bad `argument`; the round was invalid on every rank; the Buffer can go on
    mismatch = 5,   // `peer` called another operation, or this one with other settings
    excluded = 6,   // the other ranks have masked this one, and wrote it to the abort word; it is not passed on
};

enum class Phase : u32 {
    header = 0,   // a peer's counts and addresses
    payload = 1,  // a peer's rows (dispatch)
    reduced = 2,  // a peer's reduced rows (combine)
    drained = 3,  // a peer has read the rows whose places the next ones take: in a ring, or staged by an earlier combine
    grid = 4,     // other blocks or threads of this rank
    signal = 5,   // a signal of a Window
    barrier = 6,  // a peer at a barrier of a Window
};

// leave: the last header of a rank that closes its Buffer; window: a wait of a Window
enum class Op : u32 { none = 0, dispatch = 1, combine = 2, leave = 3, window = 4 };

enum class Argument : u32 {  // the argument that a bad_input or mismatch record is about
    none = 0,                // mismatch: `expected` and `seen` are the Op, or RoundHeader::call, of this rank and of `peer`
    topk_idx = 1,            // `expected` = num_experts, `seen` = the id
    max_rows = 2,            // `expected` = rows for which `peer` has room (batched: for each expert), `seen` = rows it needs
    batched = 3,             // likewise, but the room is ranks * max_tokens rows, which is enough for ids without duplicates
    topk_weights = 4,        // not a number, when asked to check
    handle = 5,  // bad_input: changed since its dispatch; mismatch: `expected` and `seen` are round_of this rank's and `peer`'s routes (0:
                 // no route)
    rejected = 6,  // mismatch: `expected` and `seen` are State::rejected of this rank and of `peer`; no later round can be paired
};

struct alignas(64) FailureRecord {
    u32 code;      // Failure; written last
    u32 op;        // Op
    u32 phase;     // Phase
    u32 argument;  // Argument
    i32 rank;      // the rank that writes the record
    i32 peer;      // the rank it is about, -1 for none
    u32 round;     // round_number; Window: the signal, or the slot of the barrier
    u32 pad;
    i64 expected;
    i64 seen;
    u64 waited_ns;
    u64 reserved;
};
static_assert(sizeof(FailureRecord) == 64, "one cache line");

// The abort word holds 0 or the cause and the culprit, so that every survivor names the culprit, not the rank that passed the word on.
MOECOMM_BOTH constexpr u32 abort_word(Failure cause, i32 culprit) {
    return (static_cast<u32>(cause) << 16) | static_cast<u32>(culprit + 1);
}
MOECOMM_BOTH constexpr Failure abort_cause(u32 word) { return static_cast<Failure>(word >> 16); }
MOECOMM_BOTH constexpr i32 abort_culprit(u32 word) { return static_cast<i32>(word & 0xffffu) - 1; }

// Write `record` at `out` unless an earlier one is still there. Called by one thread; cannot fail. `code` is stored last, with release: a
// reader that acquires it sees the whole record.
MOECOMM_FN void leave_record(FailureRecord* out, const FailureRecord& record) {
    if (load_acquire(&out->code) != 0) return;
    const u32 code = record.code;
    out->op = record.op;
    out->phase = record.phase;
    out->argument = record.argument;
    out->rank = record.rank;
    out->peer = record.peer;
    out->round = record.round;
    out->expected = record.expected;
    out->seen = record.seen;
    out->waited_ns = record.waited_ns;
    store_release(&out->code, code);
}

}  // namespace moecomm
