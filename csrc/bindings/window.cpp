// The handle of a Window, and the calls of CPU ranks.
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "../host/during_waits.h"
#include "../window/window.h"
#include "handlers.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

Window make_window(i32 rank, i32 ranks, i32 num_signals, u64 nbytes, bool adopted) {
    if (ranks < 1 || ranks > kMaxHostRanks || rank < 0 || rank >= ranks) throw std::invalid_argument("rank, ranks");
    if (num_signals < 1 || num_signals > kMaxSignals) throw std::invalid_argument("num_signals: want 1 to " + std::to_string(kMaxSignals));
    if (nbytes < 1 || nbytes >= 1ull << 62) throw std::invalid_argument("nbytes");
    Window window{};
    lay_out(window, rank, ranks, num_signals, nbytes, adopted);
    return window;
}

void check_open(const Window& w) {
    if (w.peers == 0 || w.control == 0 || w.record == 0 || w.abort_host == 0)
        throw std::invalid_argument("the addresses of the window are not set");
}
void check_rank(const Window& w, i32 rank) {
    if (rank < 0 || rank >= w.ranks) throw std::invalid_argument("rank: want 0 to " + std::to_string(w.ranks - 1));
}
void check_signal(const Window& w, i32 index) {
    check_open(w);
    if (index < 0 || index >= w.num_signals) throw std::invalid_argument("index: want 0 to " + std::to_string(w.num_signals - 1));
}

// One of several waits that fail at once writes the record; the others return when it is there.
void await_record(const Window& w) {
    static const u32 never = 0;
    const auto* record = reinterpret_cast<const FailureRecord*>(w.record);
    py::gil_scoped_release unlocked;
    wait_until({1'000'000'000, &never, &never}, [&] { return load_acquire(&record->code) != 0; });
}

// Run a wait without the GIL, and signal handlers in it.
template <class Wait>
bool waited(const Window& w, const Wait& wait) {
    Handlers handlers([&w] { compare_exchange(reinterpret_cast<u32*>(w.abort_host), 0, abort_word(Failure::aborted, w.rank)); });
    bool ok = false;
    {
        py::gil_scoped_release unlocked;
        const host::DuringWaits during_waits([&handlers] { handlers.run(); });
        ok = wait();
    }
    handlers.rethrow();
    if (!ok) await_record(w);
    return ok;
}

void bind_calls(py::class_<Window>& handle) {
    handle
        .def(
            "signal",
            [](const Window& w, i32 rank, i32 index, u64 amount) {
                check_signal(w, index), check_rank(w, rank);
                w.signal(rank, index, amount);
            },
            py::arg("rank"), py::arg("index"), py::arg("amount"), "Add to a signal of a rank, after all earlier writes of this thread.")
        .def(
            "set_signal",
            [](const Window& w, i32 rank, i32 index, u64 value) {
                check_signal(w, index), check_rank(w, rank);
                w.set_signal(rank, index, value);
            },
            py::arg("rank"), py::arg("index"), py::arg("value"), "Store a signal of a rank, after all earlier writes of this thread.")
        .def(
            "signal_value",
            [](const Window& w, i32 index) {
                check_signal(w, index);
                return w.signal_value(index);
            },
            py::arg("index"), "Load a signal of this rank.")
        .def(
            "wait",
            [](const Window& w, i32 index, u64 value, i32 peer) {
                check_signal(w, index);
                if (peer != -1) check_rank(w, peer);
                return waited(w, [&] { return w.wait(CoopThread{}, index, value, peer); });
            },
            py::arg("index"), py::arg("value"), py::arg("peer") = -1,
            R"(Wait until a signal of this rank is at least `value`.  False on failure: record() then has the record.

In the main thread, signal handlers run during the wait.  An exception of a handler aborts it and is raised.)")
        .def(
            "barrier",
            [](const Window& w) {
                check_open(w);
                return waited(w, [&] { return w.barrier(CoopThread{}, kHostBarrier); });
            },
            "Wait until all ranks have come.  Else as wait().")
        .def(
            "leave",
            [](const Window& w) {
                check_open(w);
                w.leave();
            },
            "Tell every peer that this rank has left.  Never waits.");
}

}  // namespace

void bind_window(py::module_& m) {
    py::class_<Window> handle(m, "WindowHandle",
                              R"(Window of csrc/window/window.h: offsets for `nbytes` on each rank; addresses are set by the caller.

`adopted`: the user's bytes are in other memory than the control words, of which `total_bytes` is the size.

Raises ValueError for numbers that can't be, and in every call before all addresses are set.)");
    handle
        .def(py::init(&make_window), py::arg("rank"), py::arg("ranks"), py::arg("num_signals"), py::arg("nbytes"),
             py::arg("adopted") = false)
        .def_readwrite("peers", &Window::peers)
        .def_readwrite("control", &Window::control)
        .def_readwrite("record", &Window::record)
        .def_readwrite("abort_host", &Window::abort_host)
        .def_readwrite("timeout_ns", &Window::timeout_ns)
        .def_readonly("nbytes", &Window::nbytes)
        .def_readonly("abort", &Window::abort)
        .def_readonly("left", &Window::left)
        .def_readonly("signals", &Window::signals)
        .def_readonly("total_bytes", &Window::bytes)
        .def_readonly("rank", &Window::rank)
        .def_readonly("ranks", &Window::ranks)
        .def_readonly("num_signals", &Window::num_signals)
        .def_property_readonly(
            "address", [](const Window& w) { return reinterpret_cast<u64>(&w); }, "Address of the struct itself.")
        .def_property_readonly(
            "content", [](const Window& w) { return py::bytes(reinterpret_cast<const char*>(&w), sizeof w); }, "The bytes of the struct.");
    bind_calls(handle);
}

}  // namespace moecomm::bindings
