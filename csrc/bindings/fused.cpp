// Constants and sizes of gemm/ and fused/.
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "../fused/layer_args.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {

void bind_fused(py::module_& m) {
    m.def(
        "fused_constants",
        [] {
            return std::map<std::string, i32>{{"gemm_threads", kGemmThreads},
                                              {"most_groups", kMostGroups},
                                              {"slot_row_bytes", kSlotRowBytes},
                                              {"least_counted", kLeastCounted},
                                              {"publish_threads", kPublishThreads}};
        },
        "Constants of csrc/gemm and csrc/fused by name.");
    m.def("gemm_shared_bytes", &gemm_shared_bytes, py::arg("scaled"), py::arg("most_rows"), py::arg("stages"),
          "Dynamic shared memory of a block of the grouped GEMM.");
    m.def("expert_layer_shared_bytes", &expert_layer_shared_bytes, py::arg("scaled"), py::arg("most_rows"), py::arg("stages"),
          "Dynamic shared memory of a block of the fused layer.");
    m.def("reduce_slot_bytes", &reduce_slot_bytes, py::arg("topk"), py::arg("piece_bytes"),
          "Shared memory of a slot of the fused layer's reduction.");
}

}  // namespace moecomm::bindings
