// Placement of expert replicas.  Arguments are addresses of rows of layers, which follow each other.
#include "../runtime/balance.h"

#include <pybind11/stl.h>

#include <tuple>

#include "module.h"

namespace py = pybind11;
using namespace moecomm::runtime;

namespace moecomm::bindings {
namespace {

using Taken = std::tuple<std::vector<i64>, std::vector<i64>, i64, double>;

template <class T>
T* at(u64 address) {
    return reinterpret_cast<T*>(address);
}

void replicate(u64 load, i64 rows, i64 experts, i64 physical, u64 expert, u64 replica, u64 count) {
    for (i64 row = 0; row < rows; ++row)
        replicate_experts(at<const float>(load) + row * experts, experts, physical, at<i64>(expert) + row * physical,
                          at<i64>(replica) + row * physical, at<i64>(count) + row * experts);
}

void pack(u64 load, i64 rows, i64 items, const std::vector<i64>& capacity, u64 found, u64 place) {
    for (i64 row = 0; row < rows; ++row)
        pack_items(at<const float>(load) + row * items, items, capacity, at<i64>(found) + row * items, at<i64>(place) + row * items);
}

// The layers of a model, and how they may be placed.
struct Layers {
    RankSlots slots;
    i64 layers, experts;
    Rules rules;

    Layers(i64 layers, i64 experts, const std::vector<i64>& of_ranks, i64 nodes, bool pinned, bool nearest)
        : slots(of_ranks, nodes), layers(layers), experts(experts), rules{pinned, nearest} {}

    void spread(u64 load, u64 home, u64 expert) const {
        for (i64 layer = 0; layer < layers; ++layer)
            spread_experts(at<const double>(load) + layer * experts, experts, home == 0 ? nullptr : at<const i64>(home) + layer * experts,
                           slots, rules, at<i64>(expert) + layer * slots.size());
    }
    std::vector<std::vector<Taken>> improved(u64 load, i64 most_copies, u64 expert) const {
        std::vector<std::vector<Taken>> found(layers);
        for (i64 layer = 0; layer < layers; ++layer)
            for (Step& step : improve(at<const double>(load) + layer * experts, experts, slots, rules, most_copies,
                                      at<i64>(expert) + layer * slots.size()))
                found[layer].emplace_back(std::move(step.slots), std::move(step.experts), step.copies, step.most);
        return found;
    }
    i64 without_duplicates(u64 load, i64 most_copies, u64 expert, i64 layer) const {
        return remove_duplicates(at<const double>(load) + layer * experts, experts, slots, rules, most_copies, false,
                                 at<i64>(expert) + layer * slots.size());
    }
    void keep(u64 before, bool renumber_ranks, u64 expert) const {
        for (i64 layer = 0; layer < layers; ++layer)
            keep_slots(at<const i64>(before) + layer * slots.size(), experts, slots, renumber_ranks,
                       at<i64>(expert) + layer * slots.size());
    }
};

}  // namespace

void bind_balance(py::module_& m) {
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    m.def("replicate_experts", &replicate, py::arg("load"), py::arg("rows"), py::arg("experts"), py::arg("physical"), py::arg("expert"),
          py::arg("replica"), py::arg("count"), unlocked,
          R"(Replicate experts greedily (csrc/runtime/balance.h).  Arguments are addresses.

`load`: float32 [rows, experts].  `expert`, `replica`: int64 [rows, physical].  `count`: int64 [rows, experts].)");
    m.def("pack_items", &pack, py::arg("load"), py::arg("rows"), py::arg("items"), py::arg("capacity"), py::arg("pack"), py::arg("place"),
          unlocked, R"(Pack items, heaviest first, each to the lightest pack that is not full.  Arguments are addresses.

`load`: float32 [rows, items].  `pack`, `place`: int64 [rows, items].)");
    py::class_<Layers>(m, "Balance", R"(Placement of the experts of layers on the slots of ranks (csrc/runtime/balance.h).

Arguments of calls are addresses: `load` of float64 [layers, experts], `expert` of int64 [layers, slots].)")
        .def(py::init<i64, i64, const std::vector<i64>&, i64, bool, bool>(), py::arg("layers"), py::arg("experts"), py::arg("slots"),
             py::arg("nodes"), py::arg("pinned"), py::arg("nearest"))
        .def("spread", &Layers::spread, py::arg("load"), py::arg("home"), py::arg("expert"), unlocked,
             "Write a new placement.  `home`: the node of each expert, int64 [layers, experts]; 0: any.")
        .def("improve", &Layers::improved, py::arg("load"), py::arg("most_copies"), py::arg("expert"), unlocked,
             R"(Improve a placement in place.

Returns:
    For each layer its steps: slots and their new experts, copies until then, and the largest load of a rank.)")
        .def("remove_duplicates", &Layers::without_duplicates, py::arg("load"), py::arg("most_copies"), py::arg("expert"), py::arg("layer"),
             unlocked, "Remove second replicas of an expert from ranks of one layer.  Returns the copies needed.")
        .def("keep_slots", &Layers::keep, py::arg("before"), py::arg("renumber_ranks"), py::arg("expert"), unlocked,
             "Renumber ranks and slots so that the fewest experts change their slot.  `before`: int64 [layers, slots].");
}

}  // namespace moecomm::bindings
