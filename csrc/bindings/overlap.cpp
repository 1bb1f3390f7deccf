// Constants of overlap/.
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "../overlap/args.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {

void bind_overlap(py::module_& m) {
    m.def(
        "overlap_constants",
        [] {
            return std::map<std::string, i32>{{"most_ranks", kOverlapRanks},
                                              {"flags", kFlags},
                                              {"state_bytes", static_cast<i32>(sizeof(OverlapState))},
                                              {"slice_rows", kSliceRows},
                                              {"gemv_rows", kGemvRows},
                                              {"gemv_columns", kGemvColumns},
                                              {"gemv_threads", kGemvThreads},
                                              {"embedding_threads", kEmbeddingThreads},
                                              {"all_reduce_threads", kAllReduceThreads},
                                              {"all_reduce_words", kAllReduceWords},
                                              {"all_reduce_bytes", kAllReduceBytes}};
        },
        "Constants of csrc/overlap by name.");
    m.def("gemv_lines", &gemv_lines, py::arg("most_rows"), "Lines of a packet of the GEMV, for 8 or 16 rows.");
    m.def("split_sums_bytes", &split_sums_bytes, py::arg("most_rows"), "Dynamic shared memory for the sums of a block of split products.");
    m.def("gemv_shared_bytes", &gemv_shared_bytes, py::arg("most_rows"), "Dynamic shared memory of a block of the GEMV.");
}

}  // namespace moecomm::bindings
