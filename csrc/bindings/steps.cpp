// Steps of rounds of CPU ranks, for traces.
#include "../host/steps.h"

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

using Shown = std::tuple<u64, u64, u32, i32, i32, std::string>;

std::pair<std::vector<Shown>, u64> take_steps(u64 record) {
    std::vector<Shown> steps;
    const auto log = host::steps_of(record);
    if (log == nullptr) return {steps, 0};
    const host::StepLog::Taken taken = log->take();
    for (const host::Step& step : taken.steps)
        steps.emplace_back(step.begin_ns, step.end_ns, step.round, step.worker, step.peer, step.name);
    return {steps, taken.dropped};
}

}  // namespace

void bind_steps(py::module_& m) {
    m.def("trace_rounds", &host::trace_rounds, py::arg("record"), py::arg("on"),
          "Begin or end to time the steps of host rounds whose context has this record.");
    m.def("take_steps", &take_steps, py::arg("record"),
          R"(Return the steps since the last call, and how many had no room.

A step: begin and end on CLOCK_MONOTONIC in ns, round, thread of the rank's team, rank that was waited for (-1: no
wait), name.)");
}

}  // namespace moecomm::bindings
