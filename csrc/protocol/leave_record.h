// Writing a failure record once.
#pragma once
#include "order.h"
#include "record.h"

namespace moecomm {

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
