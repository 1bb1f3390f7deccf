// Python's classes and tables of structs and enumerations that C++ has as well. Their fields come from macros that fields.py writes from
// the headers when the package is built.
#include <moecomm_fields.h>
#include <pybind11/native_enum.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <vector>

#include "../device/between_rounds_args.h"
#include "../elementwise/args.h"
#include "../fused/layer_args.h"
#include "../overlap/args.h"
#include "../protocol/placement.h"
#include "../protocol/stand_ins.h"
#include "../window/call_args.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

struct Field {
    const char* name;
    size_t offset, size, alignment;
};

// No field has been left out: each begins where the one before it ends, but for its alignment.
template <size_t n>
constexpr bool covers(const std::array<Field, n>& fields, size_t size, size_t alignment) {
    size_t end = 0;
    for (const Field& field : fields) {
        end = (end + field.alignment - 1) / field.alignment * field.alignment;
        if (field.offset != end) return false;
        end += field.size;
    }
    return (end + alignment - 1) / alignment * alignment == size;
}
#define FIELD(name) Field{#name, offsetof(S, name), sizeof(S::name), alignof(decltype(S::name))},
#define CHECK_FIELDS(Struct)                                                          \
    static_assert(                                                                    \
        [] {                                                                          \
            using S = Struct;                                                         \
            return covers(std::array{FIELDS_##Struct(FIELD)}, sizeof(S), alignof(S)); \
        }(),                                                                          \
        "a field of " #Struct " is missing")

// A field of a class, unless it is an array or padding.
template <class Struct, class T>
void bind_field(py::class_<Struct>& bound, const char* name, T Struct::* field, bool writable) {
    if (std::string_view(name) == "pad" || std::string_view(name) == "reserved") return;
    if constexpr (!std::is_array_v<T>) writable ? bound.def_readwrite(name, field) : bound.def_readonly(name, field);
}
#define BIND_FIELD(name) bind_field(bound, #name, &S::name, writable);
// Define `bind_fields` for a class of a struct.
#define FIELDS_OF(Struct)                                        \
    CHECK_FIELDS(Struct);                                        \
    void bind_fields(py::class_<Struct>& bound, bool writable) { \
        using S = Struct;                                        \
        FIELDS_##Struct(BIND_FIELD)                              \
    }
FIELDS_OF(Shape)
FIELDS_OF(WindowLayout)
FIELDS_OF(Context)
FIELDS_OF(Route)
FIELDS_OF(DispatchArgs)
FIELDS_OF(CombineArgs)
FIELDS_OF(FailureRecord)

// A struct that starts as zeros, can be copied, and can be handed on by address.
template <class Struct>
py::class_<Struct> bind_struct(py::module_& m, const char* name, const char* doc) {
    py::class_<Struct> bound(m, name, doc);
    bound.def(py::init([] { return Struct{}; }))
        .def("__copy__", [](const Struct& self) { return Struct(self); })
        .def("__deepcopy__", [](const Struct& self, const py::typing::Dict<py::int_, py::object>&) { return Struct(self); })
        .def_property_readonly("address", [](const Struct& self) { return reinterpret_cast<u64>(&self); })
        .def_property_readonly("nbytes", [](const Struct&) { return sizeof(Struct); });
    bind_fields(bound, true);
    return bound;
}

#define VALUE(name) .value(#name, E::name)
#define BIND_ENUM(Enum)                                                                                               \
    {                                                                                                                 \
        using E = moecomm::Enum;                                                                                      \
        py::native_enum<E>(m, #Enum, "enum.IntEnum", #Enum " of " HEADER_##Enum ".") FIELDS_##Enum(VALUE).finalize(); \
    }

void bind_enums(py::module_& m) {
    BIND_ENUM(Layout)
    BIND_ENUM(Type) BIND_ENUM(Part) BIND_ENUM(ScaleFormat) BIND_ENUM(Failure) BIND_ENUM(Phase) BIND_ENUM(Op) BIND_ENUM(Argument)
}

void set_heap_bytes(Shape& shape, i64 bytes) {
    if (bytes < 0 || bytes > kMostHeapBytes) throw std::invalid_argument("heap_bytes: want 0 to " + std::to_string(kMostHeapBytes));
    shape.heap_and_experts = heap_and_experts(bytes, static_cast<i32>(shape.heap_and_experts >> kHeapBits));
}

void set_named_experts(Shape& shape, i32 experts) {
    if (experts < 0 || experts > static_cast<i32>(kMostSlots))
        throw std::invalid_argument("named_experts: want 0 to " + std::to_string(kMostSlots));
    shape.heap_and_experts = heap_and_experts(heap_bytes(shape), experts);
}

Shape make_shape(i32 ranks, i32 slots, i32 topk, i32 max_tokens, i32 ring_tokens, i64 staged_row_bytes, i64 heap_bytes, i64 packet_bytes,
                 i32 domain_ranks, i64 receive_bytes, i32 named_experts) {
    if (ring_tokens < kMaxChunk || ring_tokens % kMaxChunk != 0)
        throw std::invalid_argument("ring_tokens: want a multiple of " + std::to_string(kMaxChunk));
    if (domain_ranks < 0 || (domain_ranks > 0 && ranks % domain_ranks != 0))
        throw std::invalid_argument("domain_ranks: want 0 or a divisor of ranks");
    Shape shape{ranks, slots, topk, max_tokens, ring_tokens, domain_ranks, packet_bytes, staged_row_bytes, 0, receive_bytes};
    set_named_experts(shape, named_experts);
    set_heap_bytes(shape, heap_bytes);
    return shape;
}

i32 stand_in_of(const Shape& shape, const std::vector<i32>& masked, i32 forwarder) {
    const auto check = [&](i32 rank) {
        if (rank < 0 || rank >= shape.ranks) throw std::invalid_argument("stand_in: no such rank: " + std::to_string(rank));
    };
    check(forwarder);
    std::vector<u64> words(ceil_div(shape.ranks, 64));
    for (const i32 rank : masked) {
        check(rank);
        words[rank / 64] |= u64{1} << rank % 64;
    }
    return stand_in(shape, static_cast<const u64*>(words.data()), forwarder).rank;
}

void bind_layout(py::module_& m) {
    py::class_<Shape> shape(m, "Shape", R"(Sizes that all ranks of a Buffer have alike: Shape of csrc/protocol/layout.h.

`named_experts`: of callers, with a placement; 0: those of rounds, as many as `slots`.
ValueError unless `ring_tokens` is a positive multiple of 32 (kMaxChunk) and `domain_ranks` is 0 or divides `ranks`.)");
    shape.def(py::init(&make_shape), py::arg("ranks"), py::arg("slots"), py::arg("topk"), py::arg("max_tokens"), py::arg("ring_tokens"),
              py::arg("staged_row_bytes"), py::arg("heap_bytes"), py::arg("packet_bytes") = 0, py::arg("domain_ranks") = 0,
              py::arg("receive_bytes") = 0, py::arg("named_experts") = 0);
    bind_fields(shape, true);
    shape.def_property("heap_bytes", &heap_bytes, &set_heap_bytes, "Room for outputs.");
    shape.def_property("named_experts", &named_experts, &set_named_experts, "Experts that callers name; set to 0: `slots`.");
    py::class_<WindowLayout> layout(m, "WindowLayout", "Byte offsets in a window: WindowLayout of csrc/protocol/layout.h.");
    bind_fields(layout, false);
    layout.def_property_readonly(
        "rejected", [](const WindowLayout& w) { return w.state + offsetof(State, rejected); }, "Offset of State::rejected.");
    layout.def_property_readonly(
        "placement", [](const WindowLayout& w) { return placement_at(w); }, "Offset of Placement: csrc/protocol/placement.h.");
    m.def("window_layout", &window_layout, py::arg("shape"), "The layout of a window of this shape.");
    m.def("choice_bytes", &choice_bytes, py::arg("shape"),
          "Bytes at the begin of a heap for the choice of balanced replicas: csrc/protocol/placement.h.");
    m.def("copied_at", &copied_at, py::arg("window"), py::arg("shape"),
          "Offset in a window of the table of copies for a round: csrc/protocol/placement.h.");
    m.def("takes_weights", &takes_weights, py::arg("shape"),
          "Return whether source ranks may give a combine routing weights of their own.");
    m.def("goes_direct", &goes_direct, py::arg("shape"), py::arg("num_tokens"),
          "Return whether rows of a rank with so many tokens reach other domains without a forwarder.");
    m.def("most_chunk_tokens", &most_chunk_tokens, py::arg("shape"),
          "Return the most tokens of a chunk, such that rings have room for one whoever is masked.");
    m.def("stand_in", &stand_in_of, py::arg("shape"), py::arg("masked"), py::arg("forwarder"),
          R"(Return who forwards in the place of a rank while these are masked: itself if it is not; -1: nobody is left.

ValueError: no such rank.)");
    m.def("received_token_bytes", &received_token_bytes, py::arg("shape"), py::arg("row_bytes"), py::arg("scale_bytes"),
          "Bytes of a token in the receive buffer of another domain.");
}

std::vector<u64> peers(const Context& ctx) {
    if (ctx.all_peers == 0) return {ctx.peers, ctx.peers + kMaxRanks};
    const u64* all = reinterpret_cast<const u64*>(ctx.all_peers);
    return {all, all + ctx.shape.ranks};
}

void set_peers(Context& ctx, const std::vector<u64>& addresses) {
    if (addresses.size() > kMaxRanks) throw std::invalid_argument("at most " + std::to_string(kMaxRanks) + " peers");
    std::fill(std::copy(addresses.begin(), addresses.end(), ctx.peers), ctx.peers + kMaxRanks, 0);
}

void set_shape(Context& ctx, const Shape& shape) {
    ctx.shape = shape;
    ctx.window = window_layout(shape);
}

// Is the address in the heap of our own window?
bool in_heap(const Context& ctx, u64 address) {
    const u64 window = window_of(ctx, ctx.rank);
    return address >= window + ctx.window.heap && address < window + ctx.window.bytes;
}

void bind_arguments(py::module_& m) {
    bind_struct<Context>(m, "Context", "Context of csrc/protocol/args.h.  Starts as zeros; copy.copy() copies it.")
        .def_property("peers", &peers, &set_peers,
                      "64 addresses, or those at `all_peers`.  A copy: assign a list (shorter ones are filled up with zeros).")
        .def("set_shape", &set_shape, py::arg("shape"), "Set `shape`, and `window` to its layout.")
        .def("in_heap", &in_heap, py::arg("address"), "Return whether the address is in the heap of this rank's window.");
    bind_struct<Route>(m, "Route", "Route of csrc/protocol/args.h.");
    bind_struct<DispatchArgs>(m, "DispatchArgs", R"(DispatchArgs of csrc/protocol/args.h.

`ctx` and `route` are parts of the struct, not copies: args.ctx.rank = 1 changes args; assigning copies.)");
    bind_struct<CombineArgs>(m, "CombineArgs", "CombineArgs of csrc/protocol/args.h.");
    py::class_<FailureRecord> record(m, "FailureRecordView", "FailureRecord of csrc/protocol/record.h, as it was when it was read.");
    bind_fields(record, false);
}

// KERNEL_STRUCTS: argument structs of kernels, and the structs in them, which moecomm.gpu.structs makes ctypes structs of.
#define CHECK(Struct) CHECK_FIELDS(Struct);
KERNEL_STRUCTS(CHECK)

// A struct, or a scalar as Python's struct module writes it.
template <class T>
constexpr const char* type_name() {
    if constexpr (std::is_array_v<T>) return type_name<std::remove_extent_t<T>>();
    if constexpr (std::is_same_v<T, u64>) return "Q";
    if constexpr (std::is_same_v<T, i64>) return "q";
    if constexpr (std::is_same_v<T, i32>) return "i";
    if constexpr (std::is_same_v<T, float>) return "f";
    if constexpr (std::is_same_v<T, Context>) return "Context";
#define NAME(Struct) \
    if constexpr (std::is_same_v<T, Struct>) return #Struct;
    KERNEL_STRUCTS(NAME)
}

using Row = py::typing::Tuple<py::str, py::str, py::int_, py::int_, py::int_>;
using Structs = py::typing::Dict<py::str, py::typing::Tuple<py::int_, py::typing::List<Row>>>;

Structs structs() {
    Structs found;
#define ROW(name)                                                                            \
    {                                                                                        \
        constexpr const char* type = type_name<decltype(S::name)>();                         \
        constexpr size_t count = std::extent_v<decltype(S::name)>;                           \
        rows.append(py::make_tuple(#name, type, offsetof(S, name), sizeof(S::name), count)); \
    }
#define STRUCT(Struct)                                                         \
    {                                                                          \
        using S = Struct;                                                      \
        py::list rows;                                                         \
        FIELDS_##Struct(ROW) found[#Struct] = py::make_tuple(sizeof(S), rows); \
    }
    KERNEL_STRUCTS(STRUCT)
    return found;
}

}  // namespace

void bind_structs(py::module_& m) {
    bind_enums(m);
    bind_layout(m);
    bind_arguments(m);
    m.def("structs", &structs,
          R"(The argument structs of kernels: size, and name, type, offset, size and array length (0: none) of each field.

A type is the name of a struct (`Context` is in no table), or a scalar as Python's struct module writes it.)");
}

}  // namespace moecomm::bindings
