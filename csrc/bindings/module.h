// The parts of moecomm._native.  Arguments in, errors out; what they do is in runtime/ and host/, except known_calls.cpp, the short way of
// a repeated call.
#pragma once
#include <pybind11/pybind11.h>

namespace moecomm::bindings {

void bind_arena(pybind11::module_& m);
void bind_balance(pybind11::module_& m);
void bind_call_ring(pybind11::module_& m);
void bind_bench(pybind11::module_& m);
void bind_constants(pybind11::module_& m);
void bind_known_calls(pybind11::module_& m);
void bind_peers(pybind11::module_& m);
void bind_plans(pybind11::module_& m);
void bind_rounds(pybind11::module_& m);
void bind_runner(pybind11::module_& m);
void bind_steps(pybind11::module_& m);
void bind_row_checks(pybind11::module_& m);
void bind_weights(pybind11::module_& m);
void bind_structs(pybind11::module_& m);
void bind_leave(pybind11::module_& m);
void bind_turn(pybind11::module_& m);
void bind_window(pybind11::module_& m);

}  // namespace moecomm::bindings
