// What is left behind when a round fails: who waited, for whom, in which phase of which round.  64 bytes in memory the host can read.
#pragma once
#include "compiler.h"

namespace moecomm {

enum class Failure : u32 {
    none = 0,
    timeout = 1,    // `peer` did not do `phase` in time
    peer_lost = 2,  // `peer` is known to be dead (put into the abort word by the watcher of a survivor)
    aborted = 3,    // somebody asked for it
    bad_input = 4,  // `peer` passed a bad `argument`; the round was void on every rank, the Buffer goes on
    mismatch = 5,   // `peer` called another operation, or the same with other settings
};

enum class Phase : u32 {
    header = 0,   // a peer's counts and addresses
    payload = 1,  // a peer's rows (dispatch)
    reduced = 2,  // a peer's reduced rows (combine)
    drained = 3,  // a peer's reading of rows that lie where our next ones go: in a ring, or staged by an earlier combine
    grid = 4,     // our own other blocks or threads
};

enum class Op : u32 { none = 0, dispatch = 1, combine = 2, leave = 3 };  // leave: the last notice of a rank that closes its Buffer

enum class Argument : u32 {  // what a bad_input or mismatch record speaks of
    none = 0,
    topk_idx = 1,      // `expected` = num_experts, `seen` = the id
    max_rows = 2,      // `expected` = rows offered by `peer` (batched: for an expert), `seen` = rows it needs
    batched = 3,       // the same, with the ranks * max_tokens rows offered that ids without duplicates need at most
    topk_weights = 4,  // not a number, when asked to check
    handle = 5,  // bad_input: not as its dispatch left it; mismatch: `expected` and `seen` are round_of the routes that we and `peer` have;
                 // none: what else they are
    rejected = 6,  // mismatch: `expected` and `seen` are State::rejected of this rank and of `peer`: no later round can be paired
};

struct alignas(64) FailureRecord {
    u32 code;      // Failure; written last
    u32 op;        // Op
    u32 phase;     // Phase
    u32 argument;  // Argument
    i32 rank;      // who writes this
    i32 peer;      // whom it is about, -1 if nobody
    u32 round;     // round_number
    u32 pad;
    i64 expected;
    i64 seen;
    u64 waited_ns;
    u64 reserved;
};
static_assert(sizeof(FailureRecord) == 64, "one cache line");

// The abort word holds 0 or the cause, so that every survivor names the culprit and not the messenger.
MOECOMM_BOTH constexpr u32 abort_word(Failure cause, i32 culprit) {
    return (static_cast<u32>(cause) << 16) | static_cast<u32>(culprit + 1);
}
MOECOMM_BOTH constexpr Failure abort_cause(u32 word) { return static_cast<Failure>(word >> 16); }
MOECOMM_BOTH constexpr i32 abort_culprit(u32 word) { return static_cast<i32>(word & 0xffffu) - 1; }

}  // namespace moecomm
