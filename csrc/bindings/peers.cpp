// Other processes: their windows, how we get them, and whether they live.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "../host/scaleout/link.h"
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

std::vector<int> share(Exchange& exchange, int fd, const std::vector<std::string>& addresses, double timeout_s,
                       const std::optional<py::function>& check) {
    const auto look = [&check] {
        check_signals();
        py::gil_scoped_acquire locked;
        if (check) (*check)();
    };
    std::vector<Descriptor> received;
    {
        py::gil_scoped_release unlocked;
        received = exchange.share(fd, addresses, timeout_s, look);
    }
    std::vector<int> fds;
    for (Descriptor& descriptor : received) fds.push_back(descriptor.release());
    return fds;
}

std::unique_ptr<Watcher> make_watcher(const std::vector<int>& pids, int own_rank, const py::args& abort_addresses,
                                      const std::vector<u64>& left, bool pidfds, const std::vector<int>& passed) {
    std::vector<Descriptor> owned;
    for (const int pidfd : passed) owned.emplace_back(pidfd);
    std::vector<u64> words;
    for (const auto& address : abort_addresses) words.push_back(address.cast<u64>());
    return std::make_unique<Watcher>(pids, own_rank, std::move(words), left, pidfds, std::move(owned));
}

}  // namespace

void bind_peers(py::module_& m) {
    py::class_<HostWindow>(m, "HostWindow")
        .def(py::init<u64>(), py::arg("nbytes"))
        .def_static(
            "attach", [](int fd, u64 bytes) { return std::make_unique<HostWindow>(Descriptor(fd), bytes); }, py::arg("fd"),
            py::arg("nbytes"))
        .def_property_readonly("fd", &HostWindow::fd)
        .def_property_readonly("address", &HostWindow::address)
        .def_property_readonly("nbytes", &HostWindow::bytes)
        .def("close", &HostWindow::close);
    py::class_<host::Link>(m, "Link")
        .def(py::init<const Shape&, std::vector<u64>, u64>(), py::arg("shape"), py::arg("windows"), py::arg("disorder") = 0)
        .def_property_readonly("address", [](const host::Link& self) { return reinterpret_cast<u64>(&self); })
        .def("close", &host::Link::close, Unlocked());
    py::class_<Exchange>(m, "Exchange")
        .def(py::init(&make_exchange), py::arg("rank"), py::arg("ranks"), py::arg("nonce"))
        .def_property_readonly("address", [](const Exchange& self) { return py::bytes(self.address()); })
        .def("share", &share, py::arg("fd"), py::arg("addresses"), py::arg("timeout_s"), py::arg("check") = py::none())
        .def("close", &Exchange::close, Unlocked());
    py::class_<Watcher>(m, "Watcher")
        .def(py::init(&make_watcher), py::arg("pids"), py::arg("own_rank"), py::kw_only(), py::arg("left") = std::vector<u64>(),
             py::arg("pidfds") = true, py::arg("passed") = std::vector<int>())
        .def("dead", &Watcher::dead)
        .def("close", &Watcher::close, Unlocked());
    m.def("pidfd_open", [](int pid) { return pidfd_open(pid).release(); }, py::arg("pid"));
}

}  // namespace moecomm::bindings
