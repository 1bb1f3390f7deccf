// Copies and casts of weights in the memory of CPU ranks.
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "../host/row_checks.h"
#include "../host/rows.h"
#include "../host/weight_casts.h"
#include "../protocol/order.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

// A block stays in the first cache between its copy and its hash.
constexpr i64 kCopiedBlock = 16 << 10;

// Copy bytes, and return their hash: that of what was read, or with `arrived` of what has been written. `to` == `from`: hash alone.
u64 copy_hashed(u64 to, u64 from, i64 bytes, bool arrived) {
    const bool past_cache = !arrived && bytes >= host::kPastCache;
    u64 hash = 0;
    for (i64 at = 0; at < bytes; at += kCopiedBlock) {
        const i64 size = std::min(kCopiedBlock, bytes - at);
        u8* const there = reinterpret_cast<u8*>(to) + at;
        const u8* const here = reinterpret_cast<const u8*>(from) + at;
        if (!arrived) hash = host::hash_row(here, size, hash);
        if (there != here) host::copy_row(there, here, size, past_cache);
        if (arrived) hash = host::hash_row(there, size, hash);
    }
    host::order_copied_rows();  // ahead of the store that tells peers of `to`
    return hash;
}

std::vector<u64> load_words(u64 from, i64 count) {
    std::vector<u64> words(count);
    for (i64 i = 0; i < count; ++i) words[i] = load_acquire(reinterpret_cast<const u64*>(from) + i);
    return words;
}

const std::map<std::string, host::RowFormat> kFormats = {
    {"fp8_token", host::RowFormat::fp8_token}, {"int8_token", host::RowFormat::int8_token}, {"int8_group", host::RowFormat::int8_group},
    {"mxfp8", host::RowFormat::mxfp8},         {"nvfp4", host::RowFormat::nvfp4},           {"mxfp4", host::RowFormat::mxfp4},
};

void cast_rows(const std::string& format, u64 values, u64 scales, u64 rows, Type type, i64 count, i64 columns, float global_scale) {
    const host::RowFormat to = kFormats.at(format);
    const py::gil_scoped_release waits;
    host::cast_rows(reinterpret_cast<u8*>(values), reinterpret_cast<u8*>(scales), to, reinterpret_cast<const u8*>(rows), type, count,
                    columns, global_scale);
}

void cast_blocks(u64 values, u64 scales, u64 rows, Type type, i64 count, i64 columns) {
    host::cast_blocks(reinterpret_cast<u8*>(values), reinterpret_cast<float*>(scales), reinterpret_cast<const u8*>(rows), type, count,
                      columns);
}

}  // namespace

void bind_weights(py::module_& m) {
    m.def("copy_hashed", &copy_hashed, py::arg("to"), py::arg("source"), py::arg("bytes"), py::arg("arrived"),
          py::call_guard<py::gil_scoped_release>(),
          R"(Copy bytes between addresses in the memory of CPU ranks, and return their hash, which is not that of hash_rows().

`arrived`: hash what has been written, else what was read.  With `to` == `source` nothing is copied.)");
    m.def(
        "store_u64", [](u64 to, u64 value) { store_release(reinterpret_cast<u64*>(to), value); }, py::arg("to"), py::arg("value"),
        "Store a u64 at an address in the memory of CPU ranks: whoever loads it by load_words() sees all that was written before.");
    m.def("load_words", &load_words, py::arg("source"), py::arg("count"), "Return u64 words at an address; see store_u64().");
    m.def("cast_rows", &cast_rows, py::arg("format"), py::arg("values"), py::arg("scales"), py::arg("rows"), py::arg("type"),
          py::arg("count"), py::arg("columns"), py::arg("global_scale"),
          R"(Cast rows in the memory of CPU ranks, as moecomm.formats.quantize() does.  Arguments are addresses.

`format`: any but fp8 and fp8_tensor.  `type`: of the rows, a Type.)");
    m.def("cast_blocks", &cast_blocks, py::arg("values"), py::arg("scales"), py::arg("rows"), py::arg("type"), py::arg("count"),
          py::arg("columns"), py::call_guard<py::gil_scoped_release>(),
          "Likewise a matrix to e4m3 with a scale for each block of 128 x 128, as moecomm.fused.quantize_weights() does.");
}

}  // namespace moecomm::bindings
