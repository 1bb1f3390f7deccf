// Measurements of the benchmark between CPU ranks, other than rounds.
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <stdexcept>

#include "../protocol/deadline.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

// Ping-pong of two CPU ranks: each in turn stores bytes and then a signal in the other's window. csrc/bench/ping_pong.cuh is the GPU form.
struct PingPong {
    u64 here, there;  // addresses of the blocks in this rank's window and the peer's: the signal, and the payload at offset kPayload
    u64 source;       // address of the `bytes` to store
    i64 bytes;
    u64 before;          // value of the signals at the start
    i32 warmup, rounds;  // round trips
    bool starts;         // this rank stores first
    Deadline deadline;   // of each single wait
};

constexpr i32 kPayload = 256;

void put(const PingPong& p, u64 count) {
    std::memcpy(reinterpret_cast<void*>(p.there + kPayload), reinterpret_cast<const void*>(p.source), static_cast<std::size_t>(p.bytes));
    store_release(reinterpret_cast<u64*>(p.there), count);
}

bool await_peer(const PingPong& p, u64 count) {
    return wait_until(p.deadline, [&] { return load_acquire(reinterpret_cast<const u64*>(p.here)) >= count; }) == Waited::ok;
}

// Return the nanoseconds of the timed round trips; nullopt on timeout or abort.
std::optional<u64> ping_pong(const PingPong& p) {
    u64 start = now_ns();
    for (i32 round = 0; round < p.warmup + p.rounds; ++round) {
        if (round == p.warmup) start = now_ns();
        const u64 count = p.before + static_cast<u64>(round) + 1;
        if (!p.starts && !await_peer(p, count)) return std::nullopt;
        put(p, count);
        if (p.starts && !await_peer(p, count)) return std::nullopt;
    }
    return now_ns() - start;
}

std::optional<u64> host_ping_pong(u64 here, u64 there, u64 source, i64 nbytes, u64 before, i32 warmup, i32 rounds, bool starts,
                                  u64 timeout_ns, u64 abort_here, u64 abort_host) {
    for (const u64 word : {here, there})
        if (word == 0 || word % alignof(u64) != 0) throw std::invalid_argument("here, there: not the address of a signal");
    for (const u64 word : {abort_here, abort_host})
        if (word == 0 || word % alignof(u32) != 0) throw std::invalid_argument("abort_here, abort_host: not the address of an abort word");
    if (source == 0 || nbytes < 1 || warmup < 0 || rounds < 1) throw std::invalid_argument("nothing to put");
    const Deadline deadline{timeout_ns, reinterpret_cast<const u32*>(abort_here), reinterpret_cast<const u32*>(abort_host)};
    py::gil_scoped_release unlocked;
    return ping_pong({here, there, source, nbytes, before, warmup, rounds, starts, deadline});
}

}  // namespace

void bind_bench(py::module_& m) {
    m.def("host_ping_pong", &host_ping_pong, py::kw_only(), py::arg("here"), py::arg("there"), py::arg("source"), py::arg("nbytes"),
          py::arg("before"), py::arg("warmup"), py::arg("rounds"), py::arg("starts"), py::arg("timeout_ns"), py::arg("abort_here"),
          py::arg("abort_host"), R"(Put `nbytes` from `source` behind the signal (u64) of the peer's block `there`, in turn with the peer.

`before`: the count of both signals at the start.  The payload begins 256 bytes into a block.  Returns the
nanoseconds of `rounds` round trips after `warmup` others; None if the peer did not come in time, or an abort word
was set.

Raises:
    ValueError: addresses or numbers that can't be.)");
}

}  // namespace moecomm::bindings
