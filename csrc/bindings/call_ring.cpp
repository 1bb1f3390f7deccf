#include "call_ring.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

// Wall-clock time, as Python's time.time_ns().
i64 wall_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

CallKind::CallKind(std::string op, u64 call, py::object dtype, i64 row_bytes)
    : op(std::move(op)),
      call(call),
      dtype(std::move(dtype)),
      row_bytes(row_bytes),
      begins_round(this->op != "dispatch_end" && this->op != "reduce"),
      dispatches(this->op == "dispatch" || this->op == "dispatch_begin") {}

i64 CallRing::begin(const py::object& kind, i64 tokens, bool captured) {
    CallKind& made = kind.cast<CallKind&>();
    replays |= captured;
    ++steps;
    if (made.begins_round) ++rounds;
    if (made.dispatches) last_dispatch_ = rounds;
    ++made.calls;
    made.tokens += tokens;
    // The old entry is dropped last: that may run other code.
    Call call{recorded_, kind, steps, round_of(made), tokens, wall_ns(), captured, rejected, 0};
    std::swap(place(recorded_), call);
    return recorded_++;
}

void CallRing::end(i64 record) {
    if (on_host_) place(record).ended_ns = wall_ns();
}

void CallRing::settle() {
    const i64 now = wall_ns();
    for (i64 record = std::max(settled_, recorded_ - kCalls); record < recorded_; ++record) {
        Call& call = place(record);
        if (call.ended_ns == 0 && !call.captured) call.ended_ns = now;
    }
    settled_ = recorded_;
}

void CallRing::reject(py::object what) {
    const i64 now = wall_ns();
    Call call{recorded_, std::move(what), steps, 0, 0, now, false, rejected++, now};
    std::swap(place(recorded_), call);
    ++recorded_;
}

py::typing::List<py::object> CallRing::calls() const {
    const std::array<Call, kCalls> now = calls_;  // the allocations below may run other code
    const i64 end = recorded_;
    py::typing::List<py::object> found;
    for (i64 record = std::max<i64>(0, end - kCalls); record < end; ++record) {
        const Call& c = now[static_cast<size_t>(record % kCalls)];
        found.append(py::make_tuple(c.record, c.what, c.step, c.round, c.tokens, c.created_ns, c.captured, c.rejected, c.ended_ns));
    }
    return found;
}

void bind_call_ring(py::module_& m) {
    py::class_<CallKind>(m, "CallKind", R"(Calls of one operation with the same options, and how many there were.

`op`: "dispatch", "dispatch_begin", "dispatch_end", "combine" or "reduce" (the second half of a fused layer).
`call`: the options that all ranks pass alike, as moecomm.rounds.signature packs them.  `dtype`: of the rows.
`row_bytes`: bytes of a token on this rank, scales included.)")
        .def(py::init<std::string, u64, py::object, i64>(), py::arg("op"), py::arg("call"), py::arg("dtype"), py::arg("row_bytes"))
        .def_readonly("op", &CallKind::op)
        .def_readonly("call", &CallKind::call)
        .def_readonly("dtype", &CallKind::dtype)
        .def_readonly("row_bytes", &CallKind::row_bytes)
        .def_readonly("begins_round", &CallKind::begins_round)
        .def_readonly("dispatches", &CallKind::dispatches)
        .def_readwrite("calls", &CallKind::calls)
        .def_readwrite("tokens", &CallKind::tokens);
    py::class_<CallRing> ring(m, "CallRing", R"(The ring of the flight recorder: see moecomm.rounds.flight.

`on_host`: rounds are over when the call that runs them returns.)");
    ring.def(py::init<bool>(), py::arg("on_host"))
        .def_readwrite("steps", &CallRing::steps)
        .def_readwrite("rounds", &CallRing::rounds)
        .def_readwrite("replays", &CallRing::replays)
        .def_readonly("rejected", &CallRing::rejected, "Calls that failed on this rank before they reached the others.")
        .def("begin_call", &CallRing::begin, py::arg("kind"), py::arg("tokens"), py::arg("captured"),
             "Record a call that is about to be made; return its number for end_call().")
        .def("end_call", &CallRing::end, py::arg("record"), "Record that a call has returned.")
        .def("round_of", &CallRing::round_of, py::arg("kind"),
             "The round that the last call belongs to, which is of this kind; 0: not known.")
        .def("settle", &CallRing::settle, "Record that every call so far is over, because the host has waited for it.  Not captured ones.")
        .def("reject_call", &CallRing::reject, py::arg("what"), "Record a call that failed before it reached the other ranks.")
        .def("calls", &CallRing::calls, "The fields of moecomm.rounds.flight.Entry of each call, the oldest first.");
    ring.attr("LENGTH") = CallRing::kCalls;
}

}  // namespace moecomm::bindings
