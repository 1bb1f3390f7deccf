// Constants and sizes that Python knows by these names and by no numbers of its own.
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "../elementwise/args.h"
#include "../fused/layer_args.h"
#include "../overlap/args.h"
#include "../protocol/args.h"
#include "../protocol/domains.h"
#include "../protocol/packets.h"
#include "../protocol/placement.h"
#include "../protocol/round_header.h"
#include "../protocol/row_descriptor.h"
#include "../window/window.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
void bind_constants(py::module_& m) {
    m.def(
        "constants",
        [] {
            return std::map<std::string, i64>{{"max_ranks", kMaxRanks},
                                              {"max_host_ranks", kMaxHostRanks},
                                              {"max_topk", kMaxTopk},
                                              {"max_chunk", kMaxChunk},
                                              {"max_blocks", kMaxBlocks},
                                              {"most_weights", kMostWeights},
                                              {"quant_group", kQuantGroup},
                                              {"packet_tokens", kPacketTokens},
                                              {"most_packet_entries", kMostPacketEntries},
                                              {"wanted_words", kWantedWords},
                                              {"line_bytes", kLineBytes},
                                              {"line_words", kLineWords},
                                              {"packet_lines", kPacketLines},
                                              {"pass_threads", kPassThreads},
                                              {"max_signals", kMaxSignals},
                                              {"host_barrier", kHostBarrier},
                                              {"scalar_counters", kScalarCounters},
                                              {"peer_counters", kPeerCounters},
                                              {"descriptor_bytes", sizeof(RowDescriptor)},
                                              {"round_header_bytes", sizeof(RoundHeader)},
                                              {"most_slots", kMostSlots},
                                              {"most_heap_bytes", kMostHeapBytes},
                                              {"most_replicas", kMostReplicas},
                                              {"generation", kGeneration},
                                              {"digest_bits", kDigestBits},
                                              {"by_table", kByTable},
                                              {"balanced", kBalanced},
                                              {"replicated", kReplicated},
                                              {"share_passes", kSharePasses},
                                              {"copy_part", kCopyPart}};
        },
        "Constants and sizes of csrc/protocol by name.");
    m.def(
        "staged_bytes", [](i32 kind, i64 hidden) { return staged_bytes(static_cast<Type>(kind), hidden); }, py::arg("kind"),
        py::arg("hidden"), "Bytes of a row of a Type that combine stages, with its scales.");
    m.def(
        "fused_constants",
        [] {
            return std::map<std::string, i32>{{"gemm_threads", kGemmThreads},    {"most_groups", kMostGroups},
                                              {"slot_row_bytes", kSlotRowBytes}, {"packed_row_bytes", kPackedRowBytes},
                                              {"least_counted", kLeastCounted},  {"publish_threads", kPublishThreads}};
        },
        "Constants of csrc/gemm and csrc/fused by name.");
    m.def("gemm_threads", &gemm_threads, py::arg("most_rows"), py::arg("packed_stages"), "Threads of a block of the grouped GEMM.");
    m.def("gemm_shared_bytes", &gemm_shared_bytes, py::arg("scaled"), py::arg("most_rows"), py::arg("stages"), py::arg("mxfp4") = false,
          py::arg("dynamic") = false, py::arg("packed_stages") = 0, "Dynamic shared memory of a block of the grouped GEMM.");
    m.def("expert_layer_shared_bytes", &expert_layer_shared_bytes, py::arg("scaled"), py::arg("most_rows"), py::arg("stages"),
          py::arg("packed_stages") = 0, "Dynamic shared memory of a block of the fused layer.");
    m.def("reduce_slot_bytes", &reduce_slot_bytes, py::arg("topk"), py::arg("piece_bytes"),
          "Shared memory of a slot of the fused layer's reduction.");
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
