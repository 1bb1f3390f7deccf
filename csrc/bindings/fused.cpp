// The argument structs of fused/, as tables that moecomm.fused.structs makes ctypes structs from, and the sizes that both sides know.
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <array>
#include <cstddef>
#include <map>
#include <string>
#include <type_traits>

#include "../fused/layer_args.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

struct Field {
    const char* name;
    const char* type;  // a struct, or a scalar as Python's struct module writes it
    size_t offset, size, alignment;
    size_t count;  // of an array, else 0
};

template <class T>
constexpr const char* type_name() {
    if constexpr (std::is_array_v<T>) return type_name<std::remove_extent_t<T>>();
    if constexpr (std::is_same_v<T, u64>) return "Q";
    if constexpr (std::is_same_v<T, i64>) return "q";
    if constexpr (std::is_same_v<T, i32>) return "i";
    if constexpr (std::is_same_v<T, TensorMap>) return "TensorMap";
    if constexpr (std::is_same_v<T, Grouping>) return "Grouping";
    if constexpr (std::is_same_v<T, GemmArgs>) return "GemmArgs";
    if constexpr (std::is_same_v<T, LayerArgs>) return "LayerArgs";
    if constexpr (std::is_same_v<T, Context>) return "Context";
    return "";
}

// No field has been left out: each begins where the one before it ends, but for its alignment.
template <size_t n>
constexpr bool covers(const std::array<Field, n>& fields, size_t size, size_t alignment) {
    size_t end = 0;
    for (const Field& field : fields) {
        end = (end + field.alignment - 1) / field.alignment * field.alignment;
        if (field.offset != end || field.type[0] == '\0') return false;
        end += field.size;
    }
    return (end + alignment - 1) / alignment * alignment == size;
}

#define FIELD(name)                                                                                            \
    Field {                                                                                                    \
        #name, type_name<decltype(S::name)>(), offsetof(S, name), sizeof(S::name), alignof(decltype(S::name)), \
            std::extent_v<decltype(S::name)>                                                                   \
    }

// (size, fields) of a struct S by its name.
#define STRUCT(Struct, ...)                                                                                   \
    {                                                                                                         \
        using S = Struct;                                                                                     \
        constexpr std::array fields{__VA_ARGS__};                                                             \
        static_assert(covers(fields, sizeof(S), alignof(S)), "a field of " #Struct " is missing");            \
        py::list rows;                                                                                        \
        for (const Field& f : fields) rows.append(py::make_tuple(f.name, f.type, f.offset, f.size, f.count)); \
        found[#Struct] = py::make_tuple(sizeof(S), rows);                                                     \
    }

using Row = py::typing::Tuple<py::str, py::str, py::int_, py::int_, py::int_>;
using Structs = py::typing::Dict<py::str, py::typing::Tuple<py::int_, py::typing::List<Row>>>;

Structs structs() {
    Structs found;
    STRUCT(TensorMap, FIELD(words))
    STRUCT(Grouping, FIELD(groups), FIELD(alignment), FIELD(group_rows), FIELD(rows), FIELD(column_tiles), FIELD(band), FIELD(unit),
           FIELD(most_rows))
    STRUCT(GemmArgs, FIELD(w), FIELD(x), FIELD(out), FIELD(counts), FIELD(columns), FIELD(depth), FIELD(grouping), FIELD(x_scales),
           FIELD(w_scales), FIELD(out_scales), FIELD(x_scale_row), FIELD(x_scale_column))
    STRUCT(LayerArgs, FIELD(ctx), FIELD(x), FIELD(published), FIELD(received), FIELD(owners), FIELD(weights), FIELD(bias), FIELD(out),
           FIELD(x_stride), FIELD(bias_stride), FIELD(out_stride), FIELD(descriptors), FIELD(num_rows), FIELD(rows), FIELD(destinations),
           FIELD(fetched), FIELD(tile_done), FIELD(next_tile), FIELD(next_row), FIELD(failed), FIELD(num_tokens), FIELD(max_rows),
           FIELD(row_tiles))
    STRUCT(ExpertLayerArgs, FIELD(first), FIELD(second), FIELD(layer), FIELD(fetchers), FIELD(together), FIELD(lag), FIELD(rotation_step))
    return found;
}

}  // namespace

void bind_fused(py::module_& m) {
    m.def("fused_structs", &structs,
          R"(The argument structs of csrc/fused: size, and name, type, offset, size and array length (0: none) of each field.

A type is the name of a struct (`Context` is in no table), or a scalar as Python's struct module writes it.)");
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
