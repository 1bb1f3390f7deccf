// Enumerations, constants and sizes of protocol/ that Python knows by these names and by no numbers of its own.
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "../elementwise/pass_threads.h"
#include "../protocol/domains.h"
#include "../protocol/packets.h"
#include "../protocol/round_header.h"
#include "../protocol/row_descriptor.h"
#include "../window/window.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

void bind_enums(py::module_& m) {
    py::native_enum<Layout>(m, "Layout", "enum.IntEnum", "Layout of csrc/protocol/args.h.")
        .value("flat", Layout::flat)
        .value("expert", Layout::expert)
        .value("batched", Layout::batched)
        .finalize();
    py::native_enum<Type>(m, "Type", "enum.IntEnum", "Type of csrc/protocol/args.h.")
        .value("bf16", Type::bf16)
        .value("fp16", Type::fp16)
        .value("fp32", Type::fp32)
        .value("e4m3", Type::e4m3)
        .finalize();
    py::native_enum<Part>(m, "Part", "enum.IntEnum", "Part of csrc/protocol/args.h.")
        .value("whole", Part::whole)
        .value("begin", Part::begin)
        .value("end", Part::end)
        .finalize();
    py::native_enum<ScaleFormat>(m, "ScaleFormat", "enum.IntEnum", "ScaleFormat of csrc/protocol/args.h.")
        .value("fp32", ScaleFormat::fp32)
        .value("ue8m0", ScaleFormat::ue8m0)
        .finalize();
    py::native_enum<Failure>(m, "Failure", "enum.IntEnum", "Failure of csrc/protocol/record.h.")
        .value("none", Failure::none)
        .value("timeout", Failure::timeout)
        .value("peer_lost", Failure::peer_lost)
        .value("aborted", Failure::aborted)
        .value("bad_input", Failure::bad_input)
        .value("mismatch", Failure::mismatch)
        .value("excluded", Failure::excluded)
        .finalize();
    py::native_enum<Phase>(m, "Phase", "enum.IntEnum", "Phase of csrc/protocol/record.h.")
        .value("header", Phase::header)
        .value("payload", Phase::payload)
        .value("reduced", Phase::reduced)
        .value("drained", Phase::drained)
        .value("grid", Phase::grid)
        .value("signal", Phase::signal)
        .value("barrier", Phase::barrier)
        .finalize();
    py::native_enum<Op>(m, "Op", "enum.IntEnum", "Op of csrc/protocol/record.h.")
        .value("none", Op::none)
        .value("dispatch", Op::dispatch)
        .value("combine", Op::combine)
        .value("leave", Op::leave)
        .value("window", Op::window)
        .finalize();
    py::native_enum<moecomm::Argument>(m, "Argument", "enum.IntEnum", "Argument of csrc/protocol/record.h.")
        .value("none", moecomm::Argument::none)
        .value("topk_idx", moecomm::Argument::topk_idx)
        .value("max_rows", moecomm::Argument::max_rows)
        .value("batched", moecomm::Argument::batched)
        .value("topk_weights", moecomm::Argument::topk_weights)
        .value("handle", moecomm::Argument::handle)
        .value("rejected", moecomm::Argument::rejected)
        .finalize();
}

}  // namespace

void bind_constants(py::module_& m) {
    bind_enums(m);
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
                                              {"round_header_bytes", sizeof(RoundHeader)}};
        },
        "Constants and sizes of csrc/protocol by name.");
}

}  // namespace moecomm::bindings
