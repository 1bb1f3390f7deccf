// The argument structs of protocol/, field by field.
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "../protocol/stand_ins.h"
#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

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

// A struct that starts as zeros, can be copied, and can be handed on by address.
template <class Struct>
py::class_<Struct> bind_struct(py::module_& m, const char* name, const char* doc) {
    return py::class_<Struct>(m, name, doc)
        .def(py::init([] { return Struct{}; }))
        .def("__copy__", [](const Struct& self) { return Struct(self); })
        .def("__deepcopy__", [](const Struct& self, const py::typing::Dict<py::int_, py::object>&) { return Struct(self); })
        .def_property_readonly("address", [](const Struct& self) { return reinterpret_cast<u64>(&self); })
        .def_property_readonly("nbytes", [](const Struct&) { return sizeof(Struct); });
}

void bind_layout(py::module_& m) {
    py::class_<Shape>(m, "Shape", R"(Sizes that all ranks of a Buffer have alike: Shape of csrc/protocol/layout.h.

ValueError unless `ring_tokens` is a positive multiple of 32 (kMaxChunk) and `domain_ranks` is 0 or divides `ranks`.)")
        .def(py::init([](i32 ranks, i32 experts, i32 topk, i32 max_tokens, i32 ring_tokens, i64 staged_row_bytes, i64 heap_bytes,
                         i64 packet_bytes, i32 domain_ranks, i64 receive_bytes) {
                 if (ring_tokens < kMaxChunk || ring_tokens % kMaxChunk != 0)
                     throw std::invalid_argument("ring_tokens: want a multiple of " + std::to_string(kMaxChunk));
                 if (domain_ranks < 0 || (domain_ranks > 0 && ranks % domain_ranks != 0))
                     throw std::invalid_argument("domain_ranks: want 0 or a divisor of ranks");
                 return Shape{ranks,        experts,          topk,       max_tokens,   ring_tokens, domain_ranks,
                              packet_bytes, staged_row_bytes, heap_bytes, receive_bytes};
             }),
             py::arg("ranks"), py::arg("experts"), py::arg("topk"), py::arg("max_tokens"), py::arg("ring_tokens"),
             py::arg("staged_row_bytes"), py::arg("heap_bytes"), py::arg("packet_bytes") = 0, py::arg("domain_ranks") = 0,
             py::arg("receive_bytes") = 0)
        .def_readwrite("ranks", &Shape::ranks)
        .def_readwrite("experts", &Shape::experts)
        .def_readwrite("topk", &Shape::topk)
        .def_readwrite("max_tokens", &Shape::max_tokens)
        .def_readwrite("ring_tokens", &Shape::ring_tokens)
        .def_readwrite("packet_bytes", &Shape::packet_bytes)
        .def_readwrite("staged_row_bytes", &Shape::staged_row_bytes)
        .def_readwrite("heap_bytes", &Shape::heap_bytes)
        .def_readwrite("domain_ranks", &Shape::domain_ranks)
        .def_readwrite("receive_bytes", &Shape::receive_bytes);
    py::class_<WindowLayout>(m, "WindowLayout", "Byte offsets in a window: WindowLayout of csrc/protocol/layout.h.")
        .def_readonly("abort", &WindowLayout::abort)
        .def_readonly("state", &WindowLayout::state)
        .def_property_readonly(
            "rejected", [](const WindowLayout& w) { return w.state + offsetof(State, rejected); }, "Offset of State::rejected.")
        .def_readonly("tagged_words", &WindowLayout::tagged_words)
        .def_readonly("arrived", &WindowLayout::arrived)
        .def_readonly("reduced", &WindowLayout::reduced)
        .def_readonly("credits", &WindowLayout::credits)
        .def_readonly("drained", &WindowLayout::drained)
        .def_readonly("ranges", &WindowLayout::ranges)
        .def_readonly("counting", &WindowLayout::counting)
        .def_readonly("summed", &WindowLayout::summed)
        .def_readonly("packets", &WindowLayout::packets)
        .def_readonly("split_headers", &WindowLayout::split_headers)
        .def_readonly("signals", &WindowLayout::signals)
        .def_readonly("counters", &WindowLayout::counters)
        .def_readonly("staging", &WindowLayout::staging)
        .def_readonly("receive_buffer", &WindowLayout::receive_buffer)
        .def_readonly("returned", &WindowLayout::returned)
        .def_readonly("heap", &WindowLayout::heap)
        .def_readonly("bytes", &WindowLayout::bytes)
        .def_readonly("columns", &WindowLayout::columns)
        .def_readonly("num_tagged_words", &WindowLayout::num_tagged_words);
    m.def("window_layout", &window_layout, py::arg("shape"), "The layout of a window of this shape.");
    m.def("takes_weights", &takes_weights, py::arg("shape"),
          "Return whether source ranks may give a combine routing weights of their own.");
    m.def("goes_direct", &goes_direct, py::arg("shape"), py::arg("num_tokens"),
          "Return whether rows of a rank with so many tokens reach other domains without a forwarder.");
    m.def("most_chunk_tokens", &most_chunk_tokens, py::arg("shape"),
          "Return the most tokens of a chunk, such that rings have room for one whoever is masked.");
    m.def(
        "stand_in",
        [](const Shape& shape, const std::vector<i32>& masked, i32 forwarder) {
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
        },
        py::arg("shape"), py::arg("masked"), py::arg("forwarder"),
        R"(Return who forwards in the place of a rank while these are masked: itself if it is not; -1: nobody is left.

ValueError: no such rank.)");
    m.def("received_token_bytes", &received_token_bytes, py::arg("shape"), py::arg("row_bytes"), py::arg("scale_bytes"),
          "Bytes of a token in the receive buffer of another domain.");
}

void bind_context(py::module_& m) {
    bind_struct<Context>(m, "Context", "Context of csrc/protocol/args.h.  Starts as zeros; copy.copy() copies it.")
        .def_property("peers", &peers, &set_peers,
                      "64 addresses, or those at `all_peers`.  A copy: assign a list (shorter ones are filled up with zeros).")
        .def_readwrite("all_peers", &Context::all_peers, "Address of an address for each rank, for host rounds of more than 64; 0: none.")
        .def_readwrite("record", &Context::record)
        .def_readwrite("abort_host", &Context::abort_host)
        .def_readwrite("timeout_ns", &Context::timeout_ns)
        .def_readwrite("link", &Context::link)
        .def_readwrite("shape", &Context::shape)
        .def_readwrite("window", &Context::window)
        .def_readwrite("rank", &Context::rank)
        .def("set_shape", &set_shape, py::arg("shape"), "Set `shape`, and `window` to its layout.")
        .def("in_heap", &in_heap, py::arg("address"), "Return whether the address is in the heap of this rank's window.");
    bind_struct<Route>(m, "Route", "Route of csrc/protocol/args.h.")
        .def_readwrite("token_rows", &Route::token_rows)
        .def_readwrite("token_owner", &Route::token_owner)
        .def_readwrite("token_slot", &Route::token_slot)
        .def_readwrite("sent", &Route::sent)
        .def_readwrite("ranges", &Route::ranges)
        .def_readwrite("rows", &Route::rows)
        .def_readwrite("row_weights", &Route::row_weights)
        .def_readwrite("src", &Route::src)
        .def_readwrite("forwarded", &Route::forwarded)
        .def_readwrite("key", &Route::key)
        .def_readwrite("max_rows", &Route::max_rows);
}

void bind_dispatch(py::module_& m) {
    bind_struct<DispatchArgs>(m, "DispatchArgs", R"(DispatchArgs of csrc/protocol/args.h.

`ctx` and `route` are parts of the struct, not copies: args.ctx.rank = 1 changes args; assigning copies.)")
        .def_readwrite("ctx", &DispatchArgs::ctx)
        .def_readwrite("route", &DispatchArgs::route)
        .def_readwrite("x", &DispatchArgs::x)
        .def_readwrite("in_scales", &DispatchArgs::in_scales)
        .def_readwrite("topk_idx", &DispatchArgs::topk_idx)
        .def_readwrite("topk_weights", &DispatchArgs::topk_weights)
        .def_readwrite("x_stride", &DispatchArgs::x_stride)
        .def_readwrite("in_scales_stride", &DispatchArgs::in_scales_stride)
        .def_readwrite("num_tokens", &DispatchArgs::num_tokens)
        .def_readwrite("idx_bytes", &DispatchArgs::idx_bytes)
        .def_readwrite("hidden", &DispatchArgs::hidden)
        .def_readwrite("in_type", &DispatchArgs::in_type)
        .def_readwrite("row_bytes", &DispatchArgs::row_bytes)
        .def_readwrite("scale_bytes", &DispatchArgs::scale_bytes)
        .def_readwrite("quantize", &DispatchArgs::quantize)
        .def_readwrite("scale_format", &DispatchArgs::scale_format)
        .def_readwrite("layout", &DispatchArgs::layout)
        .def_readwrite("alignment", &DispatchArgs::alignment)
        .def_readwrite("max_rows", &DispatchArgs::max_rows)
        .def_readwrite("clear_rows", &DispatchArgs::clear_rows)
        .def_readwrite("chunk_tokens", &DispatchArgs::chunk_tokens)
        .def_readwrite("repeat", &DispatchArgs::repeat)
        .def_readwrite("descriptors", &DispatchArgs::descriptors)
        .def_readwrite("call", &DispatchArgs::call)
        .def_readwrite("check_weights", &DispatchArgs::check_weights)
        .def_readwrite("workers", &DispatchArgs::workers)
        .def_readwrite("part", &DispatchArgs::part)
        .def_readwrite("out_x", &DispatchArgs::out_x)
        .def_readwrite("out_scales", &DispatchArgs::out_scales)
        .def_readwrite("out_src", &DispatchArgs::out_src)
        .def_readwrite("out_topk_idx", &DispatchArgs::out_topk_idx)
        .def_readwrite("out_weights", &DispatchArgs::out_weights)
        .def_readwrite("out_rows", &DispatchArgs::out_rows)
        .def_readwrite("tokens_per_expert", &DispatchArgs::tokens_per_expert)
        .def_readwrite("rows_per_expert", &DispatchArgs::rows_per_expert)
        .def_readwrite("num_rows", &DispatchArgs::num_rows)
        .def_readwrite("scale_columns", &DispatchArgs::scale_columns)
        .def_readwrite("scale_stride", &DispatchArgs::scale_stride)
        .def_readwrite("result_rows", &DispatchArgs::result_rows);
}

void bind_combine(py::module_& m) {
    bind_struct<CombineArgs>(m, "CombineArgs", "CombineArgs of csrc/protocol/args.h.")
        .def_readwrite("ctx", &CombineArgs::ctx)
        .def_readwrite("route", &CombineArgs::route)
        .def_readwrite("y", &CombineArgs::y)
        .def_readwrite("bias", &CombineArgs::bias)
        .def_readwrite("weight_grads", &CombineArgs::weight_grads)
        .def_readwrite("y_stride", &CombineArgs::y_stride)
        .def_readwrite("reduced_rows", &CombineArgs::reduced_rows)
        .def_readwrite("staged_hashes", &CombineArgs::staged_hashes)
        .def_readwrite("added_hashes", &CombineArgs::added_hashes)
        .def_readwrite("bias_stride", &CombineArgs::bias_stride)
        .def_readwrite("num_tokens", &CombineArgs::num_tokens)
        .def_readwrite("hidden", &CombineArgs::hidden)
        .def_readwrite("type", &CombineArgs::type)
        .def_readwrite("bias_type", &CombineArgs::bias_type)
        .def_readwrite("wire", &CombineArgs::wire)
        .def_readwrite("layout", &CombineArgs::layout)
        .def_readwrite("weighted", &CombineArgs::weighted)
        .def_readwrite("call", &CombineArgs::call)
        .def_readwrite("workers", &CombineArgs::workers)
        .def_readwrite("chunk_tokens", &CombineArgs::chunk_tokens)
        .def_readwrite("sum_grads", &CombineArgs::sum_grads)
        .def_readwrite("bias_first", &CombineArgs::bias_first)
        .def_readwrite("out", &CombineArgs::out)
        .def_readwrite("out_weight_grads", &CombineArgs::out_weight_grads)
        .def_readwrite("out_stride", &CombineArgs::out_stride)
        .def_readwrite("topk_weights", &CombineArgs::topk_weights);
}

}  // namespace

void bind_args(py::module_& m) {
    bind_layout(m);
    bind_context(m);
    bind_dispatch(m);
    bind_combine(m);
}

}  // namespace moecomm::bindings
