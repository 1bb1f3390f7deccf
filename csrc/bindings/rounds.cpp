// Running a round, and what is left when it fails.
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <variant>

#include "../host/during_waits.h"
#include "../host/executor.h"
#include "../host/row_checks.h"
#include "../protocol/domains.h"
#include "../protocol/order.h"
#include "../protocol/placement.h"
#include "../protocol/resumed.h"
#include "../runtime/driver.h"
#include "../runtime/rank_threads.h"
#include "handlers.h"
#include "module.h"
#include "runner.h"

namespace py = pybind11;
using namespace moecomm::runtime;

namespace moecomm::bindings {
namespace {

using Round = std::variant<DispatchArgs, CombineArgs>;

template <class T>
T* at(u64 address) {
    if (address == 0 || address % alignof(T) != 0) throw std::invalid_argument("not the address of such a struct");
    return reinterpret_cast<T*>(address);
}

const Context& context(const Round& round) {
    return std::visit([](const auto& args) -> const Context& { return args.ctx; }, round);
}

void check_context(const Context& ctx) {
    const i32 ranks = ctx.shape.ranks;
    if (ranks < 1 || ranks > (ctx.all_peers == 0 ? kMaxRanks : kMaxHostRanks) || ctx.rank < 0 || ctx.rank >= ranks)
        throw std::invalid_argument("ctx: rank or shape is not set");
    at<FailureRecord>(ctx.record);
    for (i32 p = 0; p < ranks; ++p)
        if (ctx.link == 0 || domain_of(ctx.shape, p) == domain_of(ctx.shape, ctx.rank)) at<u64>(window_of(ctx, p));
}

void abort_round(const Context& ctx) {
    const u64 word = ctx.abort_host != 0 ? ctx.abort_host : window_of(ctx, ctx.rank) + ctx.window.abort;
    compare_exchange(at<u32>(word), 0, abort_word(Failure::aborted, ctx.rank));
}

void execute(const DispatchArgs& args) { host::dispatch(args); }
void execute(const CombineArgs& args) { host::combine(args, nullptr); }

// Run without the GIL.  In the main thread, signal handlers run during waits.
template <class Job, class Abort>
void run_interruptibly(const Job& job, const Abort& abort) {
    Handlers handlers(abort);
    {
        py::gil_scoped_release unlocked;
        const host::DuringWaits during_waits([&handlers] { handlers.run(); });
        job();
    }
    handlers.rethrow();
}

void run_all(const std::vector<Round>& rounds) {
    for (const Round& round : rounds) check_context(context(round));
    std::vector<std::function<void()>> jobs;
    for (const Round& round : rounds) jobs.push_back([&round] { std::visit([](const auto& args) { execute(args); }, round); });
    run_interruptibly([&] { run_on_threads(jobs); },
                      [&] {
                          for (const Round& round : rounds) abort_round(context(round));
                      });
}

std::optional<FailureRecord> record(u64 address) {
    const auto* left = at<FailureRecord>(address);
    if (load_acquire(&left->code) == 0) return std::nullopt;
    return *left;
}

void leave(const Context& ctx) {
    check_context(ctx);
    host::leave(ctx);
}

u32 host_round(const Context& ctx) {
    check_context(ctx);
    return host::last_round(ctx);
}

void check_rank(const Context& ctx, i32 rank) {
    check_context(ctx);
    if (rank < 0 || rank >= ctx.shape.ranks) throw std::invalid_argument("no such rank");
}

void exclude(const Context& ctx, i32 rank) {
    check_rank(ctx, rank);
    host::exclude(ctx, rank);
}

// Bits of Mask::ranks.
std::array<u64, kMaskWords> bits_of(const std::vector<i32>& ranks) {
    std::array<u64, kMaskWords> bits{};
    for (const i32 rank : ranks) bits.at(static_cast<size_t>(rank) / 64) |= 1ull << (rank % 64);
    return bits;
}

void resume(const Context& ctx, u32 round, const std::vector<i32>& masked) {
    check_context(ctx);
    for (const i32 rank : masked) check_rank(ctx, rank);
    host::resume(ctx, round, bits_of(masked).data());
}

template <class T>
py::bytes bytes_of(const T& words) {
    return {reinterpret_cast<const char*>(&words), sizeof(words)};
}

py::bytes resumed_signals(const Shape& shape, u32 round) {
    std::vector<u64> words;
    for (u64 which = 0; which < static_cast<u64>(shape.ranks); ++which) words.push_back(resumed_signal(shape.ranks, round, which));
    return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(u64)};
}

py::bytes aborted_word(i32 rank) { return bytes_of(abort_word(Failure::aborted, rank)); }

py::bytes excluded_word(i32 rank) { return bytes_of(abort_word(Failure::excluded, rank)); }

py::bytes resumed_state(u32 round, const std::vector<i32>& masked) { return bytes_of(resumed(round, bits_of(masked).data())); }

void abort_all(const Context& ctx) {
    check_context(ctx);
    host::abort_all(ctx);
}

void count_rejected(const Context& ctx) {
    check_context(ctx);
    host::count_rejected(ctx);
}

template <class Args>
void launch(u64 function, u32 block, u32 shared_bytes, u64 stream, const Args& args, bool overlap, u32 cluster) {
    cuda_launch({function, static_cast<u32>(args.workers), block, shared_bytes, stream, overlap, cluster}, &args);
}

template <class Args>
void bind_launch(py::module_& m) {
    m.def("cuda_launch", &launch<Args>, py::arg("function"), py::arg("block"), py::arg("shared_bytes"), py::arg("stream"), py::arg("args"),
          py::arg("overlap") = false, py::arg("cluster") = 1, py::call_guard<py::gil_scoped_release>(),
          R"(Launch a CUfunction that takes the struct by value, in the current context: `args.workers` blocks.

`overlap`: the kernel may begin while its predecessor on the stream ends (programmatic stream serialization); both
use griddepcontrol.  `cluster`: blocks of a cluster, a divisor of the blocks; they run on neighboring
multiprocessors.  A driver that supports neither launches the same blocks without.

Raises:
    RuntimeError: with the driver's name of the error, or there is no driver.)");
}

void launch_choice(u64 function, u32 block, u32 shared_bytes, u64 stream, const DispatchArgs& args, bool overlap) {
    const i64 entries = static_cast<i64>(args.num_tokens) * args.ctx.shape.topk;
    cuda_launch({function, static_cast<u32>(choosing_blocks(entries)), block, shared_bytes, stream, overlap, 1}, &args);
}

// A struct that Python has packed.
void launch_packed(u64 function, u32 grid, u32 block, u32 shared_bytes, u64 stream, const py::buffer& args, bool overlap) {
    const py::buffer_info packed = args.request();
    py::gil_scoped_release unlocked;
    cuda_launch({function, grid, block, shared_bytes, stream, overlap, 1}, packed.ptr);
}

void bind_records(py::module_& m) {
    m.def("record", &record, py::arg("address"), "The record of a failed round; None while nothing has failed.");
    m.def(
        "clear_record", [](u64 address) { *at<FailureRecord>(address) = FailureRecord{}; }, py::arg("address"),
        "Make the record that of no failure.");
    m.def(
        "set_abort",
        [](u64 address, u32 cause, i32 culprit) {
            return compare_exchange(at<u32>(address), 0, abort_word(static_cast<Failure>(cause), culprit)) == 0;
        },
        py::arg("address"), py::arg("cause"), py::arg("culprit"), "Set an abort word unless it is set already; return whether it was set.");
    m.def(
        "store_word", [](u64 address, u32 value) { store_release(at<u32>(address), value); }, py::arg("address"), py::arg("value"),
        "Store a u32, after all earlier writes of this thread.");
    m.def(
        "replace_word",
        [](u64 address, u64 old, u64 value) {
            return __atomic_compare_exchange_n(at<u64>(address), &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        },
        py::arg("address"), py::arg("old"), py::arg("value"),
        "Store a u64 in place of `old`, after all earlier writes of this thread; return whether that stood there.");
    m.def("read_long_word", [](u64 address) { return load_acquire(at<const u64>(address)); }, py::arg("address"), "Load a u64.");
    m.def("read_word", [](u64 address) { return load_acquire(at<const u32>(address)); }, py::arg("address"), "Load a u32.");
}

}  // namespace

void run_host_round(const DispatchArgs& args) {
    check_context(args.ctx);
    run_interruptibly([&] { host::dispatch(args); }, [&] { abort_round(args.ctx); });
}

void run_host_round(const CombineArgs& args, host::RowChecks* checks) {
    check_context(args.ctx);
    run_interruptibly([&] { host::combine(args, checks); }, [&] { abort_round(args.ctx); });
}

void bind_rounds(py::module_& m) {
    bind_records(m);
    m.def(
        "host_dispatch", [](const DispatchArgs& args) { run_host_round(args); }, py::arg("args"),
        R"(Run this rank's part of a dispatch.  Blocks until it is over; after a failure, record() returns the record.

In the main thread, signal handlers run while it waits.  An exception of a handler, as Ctrl-C raises, aborts the
round on every rank and is raised here.

Raises:
    ValueError: rank, shape, record or peers of `args.ctx` are not set.)");
    m.def("host_combine", [](const CombineArgs& args) { run_host_round(args); }, py::arg("args"), "As host_dispatch.");
    m.def(
        "host_run_all", [](const std::vector<Round>& rounds) { run_all(rounds); }, py::arg("rounds"),
        "Run the rounds of several ranks of this process at once, each in a thread of its own.  Else as host_dispatch.");
    m.def("leave", &leave, py::arg("context"), "Announce to the peers that this rank takes part in no further host round.  Never waits.");
    m.def("count_rejected", &count_rejected, py::arg("context"),
          "Count a host call that failed before its rounds were made, in State::rejected of this rank's window.");
    m.def("abort_all", &abort_all, py::arg("context"),
          "End the next host round on every rank, none of whose waits this rank is in.  Leaves a failure record here.");
    m.def("host_round", &host_round, py::arg("context"), py::call_guard<py::gil_scoped_release>(),
          "The number of the last round that has ended on this host rank, once its puts have arrived.");
    m.def("exclude", &exclude, py::arg("context"), py::arg("rank"),
          R"(Mask this host rank at a peer: `rank` takes part in no round until it resumes.

Raises:
    ValueError: no such rank.)");
    m.def("resume", &resume, py::arg("context"), py::arg("last_round"), py::arg("masked"),
          R"(Begin anew after a round, without these ranks, when no rank of this Buffer is in a round.  Host ranks.

Raises:
    ValueError: no such rank.)");
    m.def("resumed_signals", &resumed_signals, py::arg("shape"), py::arg("last_round"),
          "The first words at WindowLayout.signals of a rank that goes on after a round; the others are 0.");
    m.def("resumed_state", &resumed_state, py::arg("last_round"), py::arg("masked"),
          "The words at WindowLayout.state of a rank that goes on after a round without the masked ranks.");
    m.def("forget_failure", &host::forget_failure, py::arg("context"),
          "Clear the failure record and the host's abort word, when no round of this rank runs.");
    m.def("aborted_word", &aborted_word, py::arg("rank"), "The abort word of ranks that a rank has stopped.");
    m.def("excluded_word", &excluded_word, py::arg("rank"), "The abort word of a rank that others have masked.");
    bind_launch<DispatchArgs>(m);
    bind_launch<CombineArgs>(m);
    m.def("cuda_launch_choice", &launch_choice, py::arg("function"), py::arg("block"), py::arg("shared_bytes"), py::arg("stream"),
          py::arg("args"), py::arg("overlap") = false, py::call_guard<py::gil_scoped_release>(),
          R"(Launch the kernel that chooses the slots of a dispatch, by as many blocks as its entries need.

`overlap`: see cuda_launch.  RuntimeError as cuda_launch.)");
    m.def("cuda_launch_packed", &launch_packed, py::arg("function"), py::arg("grid"), py::arg("block"), py::arg("shared_bytes"),
          py::arg("stream"), py::arg("args"), py::arg("overlap") = false,
          R"(Launch a CUfunction that takes a struct by value, in the current context.

`args`: the bytes of the struct, such as a ctypes.Structure: as many as the function reads.
`overlap`: see cuda_launch.

Raises:
    RuntimeError: with the driver's name of the error, or there is no driver.)");
    m.def("cuda_context", &cuda_context, "The calling thread's current CUcontext; 0: none.  RuntimeError as cuda_launch.");
    m.def("cuda_capturing", &cuda_capturing, py::arg("stream"),
          "Return whether the stream is being captured into a graph.  RuntimeError as cuda_launch.");
    m.def("cuda_missing", &cuda_missing, py::call_guard<py::gil_scoped_release>(),
          "Empty if there is a GPU to use, else a sentence that names the first thing missing.  Initializes the driver.");
}

}  // namespace moecomm::bindings
