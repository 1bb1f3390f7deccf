// Other processes: their windows, how we get them, and whether they live.
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "../host/scaleout_link.h"
#include "../runtime/exchange.h"
#include "../runtime/watcher.h"
#include "../runtime/window.h"
#include "module.h"

namespace py = pybind11;
using namespace moecomm::runtime;

namespace moecomm::bindings {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

void check_signals() {
    py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::unique_ptr<Exchange> make_exchange(int rank, int ranks, const py::bytes& nonce) {
    const std::string_view bytes = nonce;
    Exchange::Nonce value;
    if (bytes.size() != value.size()) throw std::invalid_argument("nonce must have 16 bytes");
    std::copy(bytes.begin(), bytes.end(), value.begin());
    return std::make_unique<Exchange>(rank, ranks, value);
}

std::vector<int> share(Exchange& exchange, int fd, const std::vector<py::bytes>& addresses, double timeout_s,
                       const std::optional<py::typing::Callable<py::none()>>& check) {
    const auto look = [&check] {
        check_signals();
        py::gil_scoped_acquire locked;
        if (check) (*check)();
    };
    const std::vector<std::string> named(addresses.begin(), addresses.end());
    std::vector<Descriptor> received;
    {
        py::gil_scoped_release unlocked;
        received = exchange.share(fd, named, timeout_s, look);
    }
    std::vector<int> fds;
    for (Descriptor& descriptor : received) fds.push_back(descriptor.release());
    return fds;
}

std::unique_ptr<Watcher> make_watcher(const std::vector<int>& pids, int own_rank, const py::Args<py::int_>& abort_addresses,
                                      const std::vector<u64>& left, bool pidfds, const std::vector<int>& passed) {
    std::vector<Descriptor> owned;
    for (const int pidfd : passed) owned.emplace_back(pidfd);
    std::vector<u64> words;
    for (const auto& address : abort_addresses) words.push_back(address.cast<u64>());
    return std::make_unique<Watcher>(pids, own_rank, std::move(words), left, pidfds, std::move(owned));
}

}  // namespace

void bind_peers(py::module_& m) {
    py::class_<HostWindow>(m, "HostWindow", R"(Zeroed shared memory without a name, its size sealed.

Raises:
    ValueError: nbytes is 0.
    OSError: there is not so much memory.)")
        .def(py::init<u64>(), py::arg("nbytes"))
        .def_static(
            "attach", [](int fd, u64 bytes) { return std::make_unique<HostWindow>(Descriptor(fd), bytes); }, py::arg("fd"),
            py::arg("nbytes"), R"(Map a peer's window.  Takes `fd`, also when it raises.

Raises:
    ValueError: no window of `nbytes`, or not sealed.
    OSError: it cannot be mapped.)")
        .def_property_readonly("fd", &HostWindow::fd, "-1 once closed.")
        .def_property_readonly("address", &HostWindow::address, "0 once closed.")
        .def_property_readonly("nbytes", &HostWindow::bytes)
        .def("release", &HostWindow::release, py::arg("offset"), Unlocked(),
             R"(Give the memory from `offset` on, in whole pages, back to the system.  Returns the bytes that stay.

All mappings stay, those of peers as well.  They read zeros there, and take memory again where they are written.

Raises:
    ValueError: no offset of the window, or it is closed.
    OSError: the kernel refuses.)")
        .def("close", &HostWindow::close, "Unmap.  No code of this process may still use the memory.  Dropping the object unmaps as well.");
    py::class_<host::Link>(m, "Link", R"(Route of a rank to ranks of other domains (csrc/host/scaleout_link.h).

`windows`: by rank, addresses of the windows that loads and stores do not reach, 0 for the others.)")
        .def(py::init<const Shape&, std::vector<u64>, u64>(), py::arg("shape"), py::arg("windows"), py::arg("disorder") = 0)
        .def_property_readonly(
            "address", [](const host::Link& self) { return reinterpret_cast<u64>(&self); }, "The value of Context.link.")
        .def("close", &host::Link::close, Unlocked(), "Move all pending puts first, then close.  Idempotent.");
    py::class_<Exchange>(m, "Exchange", R"(Passes a file descriptor from every rank to every rank of this host, processes or threads.

`nonce`: 16 bytes that only this job knows.

Raises:
    ValueError: rank, ranks or nonce.
    OSError: no socket can be made.)")
        .def(py::init(&make_exchange), py::arg("rank"), py::arg("ranks"), py::arg("nonce"))
        .def_property_readonly(
            "address", [](const Exchange& self) { return py::bytes(self.address()); }, "At most 64 bytes, for the peers.")
        .def("share", &share, py::arg("fd"), py::arg("addresses"), py::arg("timeout_s"), py::arg("check") = py::none(),
             R"(Every rank's descriptor, by rank; the own entry is -1.  The caller closes them; `fd` stays the caller's.

All ranks call it equally often.  `check` is called every 50 ms; an exception that it raises ends the wait.
After an error no descriptor is kept, and the Exchange can't be used again.

Raises:
    TimeoutError: naming the ranks that are missing, and the connections that were refused.
    ConnectionRefusedError: a rank is gone.
    PermissionError: another user listens at a rank's address.
    ValueError: addresses or timeout_s.
    OSError: anything else; with ECANCELED, close() was called.)")
        .def("close", &Exchange::close, Unlocked(), "End a share() of another thread.  May be called again.");
    py::class_<Watcher>(m, "Watcher", R"(Watches the processes of the other ranks.  A pid that is 0 or our own is not watched.

When one ends, every abort word (addresses of u32) that is 0 becomes (peer_lost, its rank), unless the word
`left[rank]` (0 or absent: none) is not 0 by then: that rank has announced that it leaves.  Words must live until
close().
`pidfds=False`: look every 100 ms, as is done on kernels without pidfds.
`passed`: by rank, descriptors that peers opened of themselves with pidfd_open(), -1: none.  The Watcher takes
them, also when it raises, and uses them instead of the pid, which may mean another process here.)")
        .def(py::init(&make_watcher), py::arg("pids"), py::arg("own_rank"), py::kw_only(), py::arg("left") = std::vector<u64>(),
             py::arg("pidfds") = true, py::arg("passed") = std::vector<int>())
        .def("ignore", &Watcher::ignore, py::arg("rank"), py::arg("ignored"),
             R"(From now on, set no abort words when the process of a rank ends, or set them again.

Raises:
    IndexError: no such rank.)")
        .def("dead", &Watcher::dead, "Ranks, in the order in which they were found dead.")
        .def("close", &Watcher::close, Unlocked(), "Stop watching.");
    m.def(
        "pidfd_open", [](int pid) { return pidfd_open(pid).release(); }, py::arg("pid"),
        R"(A descriptor of a process, readable once it has ended.  The caller closes it.

Raises:
    ProcessLookupError: there is no such process.
    OSError: the kernel or a sandbox refuses, or no descriptor is left.)");
}

}  // namespace moecomm::bindings
