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
                                              {"embedding_threads", kEmbeddingThreads}};
        },
        "Constants of csrc/overlap by name.");
}

}  // namespace moecomm::bindings
