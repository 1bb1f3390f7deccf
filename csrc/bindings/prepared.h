// Plans with everything that a further call of their kind needs: see known_calls.cpp.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "../runtime/combine_plan.h"
#include "../runtime/dispatch_plan.h"
#include "call_ring.h"
#include "runner.h"

namespace moecomm::bindings {

// A function that runs rounds, and the same as a Runner if it is one.
struct Run {
    Run() = default;
    explicit Run(pybind11::object made) : function(std::move(made)) {
        if (pybind11::isinstance<Runner>(function)) runner = function.cast<std::shared_ptr<Runner>>();
    }
    pybind11::object function;
    std::shared_ptr<Runner> runner;
};
using Runs = std::unordered_map<i32, Run>;  // by number of tokens

struct PreparedDispatch : runtime::DispatchPlan {
    using DispatchPlan::DispatchPlan;

    pybind11::object kind;  // a CallKind
    i32 rows = 0, most_rows = 0, groups = 1, rows_of_all = 0;
    u64 largest_bytes = 0;
    bool always_agrees = false;
    Runs runs;
};

struct PreparedCombine : runtime::CombinePlan {
    using CombinePlan::CombinePlan;

    // Bytes of a place for each reduced row; 0: they go through the ring.
    u64 reduced_bytes(const DispatchArgs& dispatch) const {
        const auto found = in_packets.find(dispatch.num_tokens);
        if (reduced_row_bytes == 0 || found == in_packets.end() || found->second) return 0;
        return static_cast<u64>(std::min(dispatch.max_rows, most_reduced_rows)) * reduced_row_bytes;
    }

    pybind11::object kind;  // a CallKind
    u64 reduced_row_bytes = 0;
    i32 most_reduced_rows = 0;
    bool peers_read_weights = false;
    pybind11::object like_out, like_grads;
    std::unordered_map<i32, bool> in_packets;  // by number of tokens
    Runs runs;
};

}  // namespace moecomm::bindings
