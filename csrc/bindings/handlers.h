// Signal handlers of Python during a wait: Python runs them in its main thread, between instructions of its own, so a wait in that thread
// runs them itself.
#pragma once
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <functional>
#include <optional>
#include <utility>

namespace moecomm::bindings {

// An exception of a handler calls `abort`, which ends the wait, and goes to the caller when the wait has ended.
class Handlers {
  public:
    explicit Handlers(std::function<void()> abort) : abort_(std::move(abort)) {}

    // In a wait, without the GIL.
    void run() {
        // Other threads have none to run, and need not wait for the GIL.  gettid() is younger than the glibc of manylinux_2_28.
        if (::syscall(SYS_gettid) != ::getpid() || raised_) return;
        pybind11::gil_scoped_acquire locked;
        if (PyErr_CheckSignals() == 0) return;
        raised_.emplace();
        abort_();
    }
    void rethrow() {
        if (raised_) throw std::move(*raised_);
    }

  private:
    const std::function<void()> abort_;
    std::optional<pybind11::error_already_set> raised_;
};

}  // namespace moecomm::bindings
