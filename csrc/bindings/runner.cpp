#include "runner.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "../host/row_checks.h"
#include "../protocol/placement.h"
#include "../runtime/driver.h"
#include "module.h"
#include "torch.h"
#include "turn.h"

namespace py = pybind11;
using namespace moecomm::runtime;

namespace moecomm::bindings {
namespace {

// Has a turn that nobody else has.
class Taken {
  public:
    explicit Taken(Turn& turn) : turn_(turn), thread_(PyThread_get_thread_ident()), taken_(turn.take()) {}
    ~Taken() {
        if (taken_) turn_.give_back(thread_);
    }
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;
    explicit operator bool() const { return taken_; }

  private:
    Turn& turn_;
    const unsigned long thread_;
    const bool taken_;
};

class HostRunner : public Runner {
  public:
    explicit HostRunner(std::shared_ptr<Turn> turn) : turn_(std::move(turn)) {}

    bool ready(i32) override { return !closed; }
    void run(const DispatchArgs& args) override {
        in_turn([&] { run_host_round(args); });
    }
    void run(const CombineArgs& args) override {
        in_turn([&] { run_host_round(args); });
    }
    void run_checked(const CombineArgs& args, host::RowChecks& checks) {
        in_turn([&] { run_host_round(args, &checks); });
    }

    bool closed = false;

  private:
    template <class Round>
    void in_turn(const Round& round) {
        const Taken taken(*turn_);
        if (!taken || closed) {  // another thread closes, or has closed
            PyErr_SetNone(py::module_::import("moecomm.errors").attr("Closed").ptr());
            throw py::error_already_set();
        }
        round();
    }

    const std::shared_ptr<Turn> turn_;
};

// State of a session on a GPU that decides how its next round is launched.
struct LaunchQueue {
    i32 device;
    u64 context;      // the CUcontext in which the session was opened
    u64 last_stream;  // of the last round
    bool used;        // there was one
};

class GpuRunner : public Runner {
  public:
    GpuRunner(std::shared_ptr<LaunchQueue> queue, py::object otherwise, const Launch& launch, const Launch& choice)
        : queue_(std::move(queue)), otherwise_(std::move(otherwise)), launch_(launch), choice_(choice) {}

    bool ready(i32 workers) override {
        if (static_cast<u32>(workers) != launch_.grid || !queue_->used || cuda_context() != queue_->context) return false;
        launch_.stream = current_stream(queue_->device);
        return launch_.stream == queue_->last_stream && !cuda_capturing(launch_.stream);
    }
    void run(const DispatchArgs& args) override {
        py::gil_scoped_release unlocked;
        if (choice_.function != 0) {
            Launch choice = choice_;
            choice.grid = static_cast<u32>(choosing_blocks(static_cast<i64>(args.num_tokens) * args.ctx.shape.topk));
            choice.stream = launch_.stream;
            cuda_launch(choice, &args);
        }
        cuda_launch(launch_, &args);
    }
    void run(const CombineArgs& args) override {
        py::gil_scoped_release unlocked;
        cuda_launch(launch_, &args);
    }
    void operator()(const py::object& args) const { otherwise_(args); }

  private:
    std::shared_ptr<LaunchQueue> queue_;
    py::object otherwise_;
    Launch launch_;
    const Launch choice_;  // ahead of each dispatch; no function: none
};

}  // namespace

void bind_runner(py::module_& m) {
    py::class_<Runner, std::shared_ptr<Runner>>(m, "Runner", "Runs rounds of a session: see Session.dispatcher.");
    py::class_<HostRunner, Runner, std::shared_ptr<HostRunner>>(
        m, "HostRunner", R"(Runs rounds of a CPU rank while it has `turn`, which close() takes as well.

Raises:
    Closed: `closed` is set, or another thread has the turn.)")
        .def(py::init<std::shared_ptr<Turn>>(), py::arg("turn"))
        .def_readwrite("closed", &HostRunner::closed)
        .def(
            "__call__", [](HostRunner& runner, const DispatchArgs& args) { runner.run(args); }, py::arg("args"),
            "Run a dispatch, as host_dispatch.")
        .def(
            "__call__", [](HostRunner& runner, const CombineArgs& args) { runner.run(args); }, py::arg("args"),
            "Run a combine, as host_combine.")
        .def("combine_checked", &HostRunner::run_checked, py::arg("args"), py::arg("checks"),
             "Run a combine, and check the rows.  All ranks do.");
    py::class_<LaunchQueue, std::shared_ptr<LaunchQueue>>(m, "LaunchQueue", R"(The stream of a session's last round.

`used`: there was one.)")
        .def(py::init([](i32 device, u64 context) { return std::make_shared<LaunchQueue>(LaunchQueue{device, context, 0, false}); }),
             py::arg("device"), py::arg("context"))
        .def_readwrite("last_stream", &LaunchQueue::last_stream)
        .def_readwrite("used", &LaunchQueue::used);
    py::class_<GpuRunner, Runner, std::shared_ptr<GpuRunner>>(m, "GpuRunner", R"(Enqueues rounds by one kernel on a GPU.

`otherwise`: does it where the stream, the context or the number of blocks differ, or a graph is captured.
`choice`: function, threads and shared memory of the kernel that chooses slots ahead of a dispatch; 0: none.)")
        .def(py::init([](std::shared_ptr<LaunchQueue> queue, py::object otherwise, u64 function, u32 blocks, u32 block, u32 shared_bytes,
                         bool overlap, u32 cluster, const std::tuple<u64, u32, u32>& choice) {
                 const auto [chooses, threads, bytes] = choice;
                 return std::make_shared<GpuRunner>(std::move(queue), std::move(otherwise),
                                                    Launch{function, blocks, block, shared_bytes, 0, overlap, cluster},
                                                    Launch{chooses, 0, threads, bytes, 0, overlap, 1});
             }),
             py::arg("queue"), py::arg("otherwise"), py::arg("function"), py::arg("blocks"), py::arg("block"), py::arg("shared_bytes"),
             py::arg("overlap"), py::arg("cluster"), py::arg("choice") = std::tuple<u64, u32, u32>{0, 0, 0})
        .def("__call__", &GpuRunner::operator(), py::arg("args"), "Call `otherwise`.");
}

}  // namespace moecomm::bindings
