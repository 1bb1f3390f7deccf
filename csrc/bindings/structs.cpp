// Argument structs of kernels, as tables that moecomm.gpu.structs makes ctypes structs from.
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <array>
#include <cstddef>
#include <type_traits>

#include "../device/between_rounds_args.h"
#include "../elementwise/copy_rows_args.h"
#include "../fused/layer_args.h"
#include "../overlap/args.h"
#include "../window/call_args.h"
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
    if constexpr (std::is_same_v<T, PaddingArgs>) return "PaddingArgs";
    if constexpr (std::is_same_v<T, Window>) return "Window";
    if constexpr (std::is_same_v<T, Overlap>) return "Overlap";
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
    STRUCT(ExpertLayerArgs, FIELD(first), FIELD(second), FIELD(layer), FIELD(fetchers), FIELD(together), FIELD(lag),
           FIELD(row_tiles_per_turn))
    STRUCT(PaddingArgs, FIELD(rows), FIELD(src), FIELD(num_rows), FIELD(counts), FIELD(bytes), FIELD(count), FIELD(group))
    STRUCT(CopyRowsArgs, FIELD(of), FIELD(to))
    STRUCT(MapArgs, FIELD(map), FIELD(dense), FIELD(ids), FIELD(weights), FIELD(tokens), FIELD(experts), FIELD(topk), FIELD(pad))
    STRUCT(BudgetArgs, FIELD(ids), FIELD(kept), FIELD(table), FIELD(parts), FIELD(to), FIELD(overflow), FIELD(needed), FIELD(entries),
           FIELD(experts), FIELD(ranks), FIELD(rank), FIELD(alignment), FIELD(budget), FIELD(pitch), FIELD(segments))
    STRUCT(ExpertTableArgs, FIELD(ids), FIELD(meant), FIELD(table), FIELD(absent), FIELD(entries), FIELD(experts), FIELD(id_bytes))
    STRUCT(TidyArgs, FIELD(of), FIELD(weights), FIELD(ids), FIELD(src), FIELD(counts), FIELD(num_rows), FIELD(to_weights), FIELD(to_ids),
           FIELD(to_src), FIELD(to_counts), FIELD(to_num_rows), FIELD(each), FIELD(experts))
    STRUCT(SwigluArgs, FIELD(both), FIELD(inner), FIELD(weights), FIELD(to_both), FIELD(to_inner), FIELD(to_weights), FIELD(end),
           FIELD(count), FIELD(columns), FIELD(width), FIELD(pad))
    STRUCT(GradientArgs, FIELD(rows), FIELD(y), FIELD(weights), FIELD(to_y), FIELD(to_weights), FIELD(count), FIELD(hidden))
    STRUCT(LeaveArgs, FIELD(ctx), FIELD(tagged_words), FIELD(bytes), FIELD(members))
    STRUCT(QuiesceArgs, FIELD(ctx), FIELD(members), FIELD(agreement), FIELD(last_round), FIELD(missing))
    STRUCT(Window, FIELD(peers), FIELD(control), FIELD(record), FIELD(abort_host), FIELD(timeout_ns), FIELD(nbytes), FIELD(abort),
           FIELD(state), FIELD(left), FIELD(barriers), FIELD(signals), FIELD(bytes), FIELD(rank), FIELD(ranks), FIELD(num_signals),
           FIELD(pad))
    STRUCT(WindowCallArgs, FIELD(window), FIELD(value), FIELD(rank), FIELD(index))
    STRUCT(Overlap, FIELD(window), FIELD(peers), FIELD(control), FIELD(state), FIELD(flags), FIELD(packets), FIELD(staging))
    STRUCT(GatherMatmulArgs, FIELD(gemm), FIELD(gathered), FIELD(overlap), FIELD(x), FIELD(gathered_out), FIELD(gathered_scales_out),
           FIELD(scales), FIELD(piece_rows), FIELD(pieces))
    STRUCT(SendMatmulArgs, FIELD(gemm), FIELD(overlap), FIELD(results), FIELD(pitch_rows), FIELD(slices))
    STRUCT(GemvArgs, FIELD(overlap), FIELD(x), FIELD(w), FIELD(out), FIELD(rows), FIELD(columns), FIELD(depth), FIELD(pad))
    STRUCT(AllReduceArgs, FIELD(overlap), FIELD(x), FIELD(out), FIELD(words))
    STRUCT(EmbeddingArgs, FIELD(overlap), FIELD(tables), FIELD(indices), FIELD(offsets), FIELD(out), FIELD(num_rows), FIELD(num_indices),
           FIELD(num_tables), FIELD(batch), FIELD(pooling), FIELD(columns), FIELD(piece_bags), FIELD(pieces))
    return found;
}

}  // namespace

void bind_structs(py::module_& m) {
    m.def("structs", &structs,
          R"(The argument structs of kernels: size, and name, type, offset, size and array length (0: none) of each field.

A type is the name of a struct (`Context` is in no table), or a scalar as Python's struct module writes it.)");
}

}  // namespace moecomm::bindings
