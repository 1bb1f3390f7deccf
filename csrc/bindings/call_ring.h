// The calls that a Buffer has made last, and how many of each kind.  Every function is one step for Python, so any thread, and a signal
// handler at any moment, may read.
#pragma once
#include <pybind11/typing.h>

#include <array>
#include <string>

#include "../protocol/compiler.h"

namespace moecomm::bindings {

// Calls of one operation with the same options, and how many there were.
struct CallKind {
    CallKind(std::string op, u64 call, pybind11::object dtype, i64 row_bytes);

    std::string op;
    u64 call;
    pybind11::object dtype;
    i64 row_bytes;
    bool begins_round, dispatches;
    i64 calls = 0, tokens = 0;
};

class CallRing {
  public:
    static constexpr i64 kCalls = 256;

    explicit CallRing(bool on_host) : on_host_(on_host) {}

    // Record a call that is about to be made; return its number for end().
    i64 begin(const pybind11::object& kind, i64 tokens, bool captured);
    // Record that a call has returned.  On GPUs it may still run: see settle().
    void end(i64 record);
    // Record that every call so far is over, because the host has waited for it.  Not captured ones.
    void settle();
    // Record a call that failed before it reached the other ranks.
    void reject(pybind11::object what);
    // The number of the round that a call of this kind, made last, belongs to; 0: not known.
    i64 round_of(const CallKind& kind) const { return replays ? 0 : kind.begins_round ? rounds : last_dispatch_; }
    // The fields of moecomm.rounds.flight.Entry of each call, the oldest first.
    pybind11::typing::List<pybind11::object> calls() const;

    i64 steps = 0, rounds = 0, rejected = 0;
    bool replays = false;

  private:
    struct Call {
        i64 record = -1;
        pybind11::object what;
        i64 step, round, tokens, created_ns;
        bool captured;
        i64 rejected, ended_ns;
    };
    Call& place(i64 record) { return calls_[static_cast<size_t>(record % kCalls)]; }

    const bool on_host_;
    std::array<Call, kCalls> calls_{};
    i64 recorded_ = 0, settled_ = 0, last_dispatch_ = 0;
};

}  // namespace moecomm::bindings
