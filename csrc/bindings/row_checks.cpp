// Hashes of rows, which verified rounds compare.
#include "../host/row_checks.h"

#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

using RowName = std::tuple<i32, i32, i32>;

std::unique_ptr<host::RowChecks> make_checks(const Shape& shape, i32 rank, const std::vector<u64>& tables) {
    if (tables.size() != static_cast<size_t>(shape.ranks)) throw std::invalid_argument("a table for each rank");
    return std::make_unique<host::RowChecks>(shape, rank, tables);
}

std::optional<RowName> take(host::RowChecks& checks) {
    const std::optional<host::CorruptRow> row = checks.take();
    if (!row) return std::nullopt;
    return RowName{row->from, row->source_rank, row->token};
}

void hash_rows(u64 hashes, u64 rows, i64 pitch, i64 width, u64 places, i64 count) {
    auto* const found = reinterpret_cast<u64*>(hashes);
    const auto* const place = reinterpret_cast<const i64*>(places);
    for (i64 i = 0; i < count; ++i) {
        const u8* row = reinterpret_cast<const u8*>(rows) + (place == nullptr ? i : place[i]) * pitch;
        found[i] = host::hash_row(row, width, found[i]);
    }
}

}  // namespace

void bind_row_checks(py::module_& m) {
    py::class_<host::RowChecks>(m, "RowChecks", R"(Hashes of the rows that combines of CPU ranks move (csrc/host/row_checks.h).

`tables`: by rank, the address of its table, of table_bytes(shape).)")
        .def(py::init(&make_checks), py::arg("shape"), py::arg("rank"), py::arg("tables"))
        .def_static("table_bytes", &host::RowChecks::table_bytes, py::arg("shape"), "Bytes of the table of a rank.")
        .def("take", &take, R"(The first row since the last call that was not as sent; None: all were.

Returns:
    The rank that sent it, the rank of its token, and the token.)")
        .def(
            "flip_later",
            [](host::RowChecks& checks, i32 sender, i32 source_rank, i32 token, i64 bit) {
                checks.flip_later({sender, source_rank, token}, bit);
            },
            py::arg("sender"), py::arg("source_rank"), py::arg("token"), py::arg("bit"),
            "For tests: flip a bit of this row once, where it has arrived.")
        .def_property_readonly("flipped", &host::RowChecks::flipped, "No flip is left to be made.");
    m.def("hash_rows", &hash_rows, py::arg("hashes"), py::arg("rows"), py::arg("pitch"), py::arg("width"), py::arg("places"),
          py::arg("count"), py::call_guard<py::gil_scoped_release>(),
          R"(Hash rows in the memory of CPU ranks.  Arguments are addresses, and numbers of bytes.

`hashes`: u64[count], which are continued.  `places`: i64[count], the number of each row; 0: they follow each other.)");
}

}  // namespace moecomm::bindings
