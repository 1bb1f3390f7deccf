#include "module.h"

#include "../runtime/error.h"

namespace py = pybind11;
using moecomm::runtime::OsError;

namespace {

// OSError's constructor picks the subclass that belongs to the number.
void raise_os_error(const OsError& error) {
    const auto raised = py::reinterpret_steal<py::object>(PyObject_CallFunction(PyExc_OSError, "is", error.number, error.what()));
    if (raised) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Windows, rounds of CPU ranks and kernel launches of moecomm.";
    py::register_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const OsError& error) {
            raise_os_error(error);
        }
    });
    moecomm::bindings::bind_structs(m);
    moecomm::bindings::bind_constants(m);
    moecomm::bindings::bind_turn(m);
    moecomm::bindings::bind_arena(m);
    moecomm::bindings::bind_balance(m);
    moecomm::bindings::bind_bench(m);
    moecomm::bindings::bind_peers(m);
    moecomm::bindings::bind_call_ring(m);
    moecomm::bindings::bind_plans(m);
    moecomm::bindings::bind_known_calls(m);
    moecomm::bindings::bind_row_checks(m);
    moecomm::bindings::bind_weights(m);
    moecomm::bindings::bind_runner(m);
    moecomm::bindings::bind_rounds(m);
    moecomm::bindings::bind_steps(m);
    moecomm::bindings::bind_leave(m);
    moecomm::bindings::bind_window(m);
}
