// Rounds prepared in one call: torch's tensors are read through their C functions, where Python would look up each attribute.
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "module.h"
#include "prepared.h"

namespace py = pybind11;
using namespace moecomm::runtime;

namespace moecomm::bindings {
namespace {

void require(bool readable) {
    if (!readable) throw std::invalid_argument("not torch tensors");
}

template <class T>
void append(std::string& to, const T& value) {
    to.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Everything that tensors say of themselves but their values, in bytes that are equal where all of it is.
std::optional<py::bytes> tensor_words(const py::typing::Tuple<std::optional<Tensor>, py::ellipsis>& tensors, bool addresses) {
    std::string words;
    for (const py::handle object : tensors) {
        const Argument argument(object);
        if (!argument.readable()) return std::nullopt;
        const DLTensor* tensor = argument.get();
        append(words, tensor == nullptr ? -1 : tensor->ndim);
        if (tensor == nullptr) continue;
        append(words, tensor->device);
        append(words, tensor->dtype);
        if (addresses) append(words, address_of(*tensor));
        for (i32 d = 0; d < tensor->ndim; ++d) {
            append(words, tensor->shape[d]);
            append(words, tensor->strides[d]);
        }
    }
    return py::bytes(words);
}

// Makes the outputs of a plan that are in one block; they keep it, and `owner`.
class Tensors {
  public:
    Tensors(const DispatchPlan& plan, const std::shared_ptr<Block>& block, const py::object& owner)
        : device_(plan.device()), block_(block), owner_(owner) {}
    py::object operator()(const Output& output) const {
        return torch_tensor(block_, output.address, output.shape, output.type, device_, owner_);
    }

  private:
    DLDevice device_;
    const std::shared_ptr<Block>& block_;
    const py::object& owner_;
};

// x, scales or None, topk_idx and topk_weights.
py::typing::Tuple<Tensor, std::optional<Tensor>, Tensor, Tensor> flat_outputs(const PreparedDispatch& plan, const DispatchArgs& args,
                                                                              const std::shared_ptr<Block>& payload,
                                                                              const std::shared_ptr<Block>& kept, const py::object& owner) {
    const FlatOutputs out = plan.flat_outputs(args);
    const Tensors arriving(plan, payload, owner), staying(plan, kept, owner);
    const py::object scales = out.scales ? arriving(*out.scales) : py::none();
    return py::make_tuple(arriving(out.x), scales, staying(out.topk_idx), staying(out.topk_weights));
}

// x, scales or None, and row_weights; `counted`: and rows_per_expert.
py::typing::Tuple<std::optional<Tensor>, py::ellipsis> expert_outputs(const PreparedDispatch& plan, const DispatchArgs& args,
                                                                      const std::shared_ptr<Block>& payload,
                                                                      const std::shared_ptr<Block>& kept, const py::object& owner,
                                                                      bool counted) {
    const ExpertOutputs out = plan.expert_outputs(args);
    const Tensors arriving(plan, payload, owner), staying(plan, kept, owner);
    const py::object scales = out.scales ? arriving(*out.scales) : py::none();
    if (!counted) return py::make_tuple(arriving(out.x), scales, staying(out.row_weights));
    return py::make_tuple(arriving(out.x), scales, staying(out.row_weights), staying(out.rows_per_expert));
}

// x, scales or None, and tokens_per_expert.
py::typing::Tuple<Tensor, std::optional<Tensor>, Tensor> layer_outputs(const PreparedDispatch& plan, const DispatchArgs& args,
                                                                       const std::shared_ptr<Block>& payload,
                                                                       const std::shared_ptr<Block>& kept, const py::object& owner) {
    const LayerOutputs out = plan.layer_outputs(args);
    const Tensors arriving(plan, payload, owner);
    const py::object scales = out.scales ? arriving(*out.scales) : py::none();
    return py::make_tuple(arriving(out.x), scales, Tensors(plan, kept, owner)(out.tokens_per_expert));
}

// x and tokens_per_expert.
py::typing::Tuple<Tensor, Tensor> batched_outputs(const PreparedDispatch& plan, const DispatchArgs& args,
                                                  const std::shared_ptr<Block>& payload, const std::shared_ptr<Block>& kept,
                                                  const py::object& owner) {
    const BatchedOutputs out = plan.batched_outputs(args);
    return py::make_tuple(Tensors(plan, payload, owner)(out.x), Tensors(plan, kept, owner)(out.tokens_per_expert));
}

// Weights of rows, src, tokens_per_expert, num_rows and, of a flat dispatch, topk_idx.
py::typing::Tuple<Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>> table_outputs(const PreparedDispatch& plan,
                                                                                       const DispatchArgs& args,
                                                                                       const std::shared_ptr<Block>& kept,
                                                                                       const py::object& owner) {
    const TableOutputs out = plan.table_outputs(args);
    const Tensors staying(plan, kept, owner);
    const py::object ids = out.topk_idx ? staying(*out.topk_idx) : py::none();
    return py::make_tuple(staying(out.weights), staying(out.src), staying(out.tokens_per_expert), staying(out.num_rows), ids);
}

// Bind the functions that run the rounds of a plan, by number of tokens.
template <class Plan, class Args>
void bind_runs(py::class_<Plan>& plan) {
    plan.def(
            "load", [](Plan& plan, i32 num_tokens, py::object run) { plan.runs[num_tokens] = Run(std::move(run)); }, py::arg("num_tokens"),
            py::arg("run"), "Set the function that runs rounds of so many tokens: see Session.dispatcher.")
        .def(
            "loaded", [](const Plan& plan, i32 num_tokens) { return plan.runs.count(num_tokens) != 0; }, py::arg("num_tokens"),
            "Return whether load() has been called for so many tokens.")
        .def(
            "run",
            [](const Plan& plan, const py::object& args) {
                const Run run = plan.runs.at(args.cast<const Args&>().num_tokens);
                run.function(args);
            },
            py::arg("args"), "Run a round by the function for its number of tokens.");
}

void bind_dispatch_plan(py::module_& m) {
    py::class_<PreparedDispatch> plan(m, "DispatchPlan",
                                      R"(Dispatches of one kind, prepared.  `args` has everything but tensors and outputs.

x, scales, topk_idx and topk_weights have the types, and are on the devices, of those of later calls.

Raises:
    ValueError: an argument in the place of a tensor is none of torch's.)");
    plan.def(py::init([](const DispatchArgs& args, bool scale_columns, py::handle x, py::handle scales, py::handle topk_idx,
                         py::handle topk_weights) {
                 const DispatchTensors like(x, scales, topk_idx, topk_weights);
                 require(like.readable());
                 return std::make_unique<PreparedDispatch>(args, scale_columns, like.get());
             }),
             py::arg("args"), py::arg("scale_columns"), py::arg("x"), py::arg("scales"), py::arg("topk_idx"), py::arg("topk_weights"))
        .def(
            "schedule",
            [](PreparedDispatch& plan, i32 num_tokens, i32 workers, i32 chunk_tokens) {
                plan.schedules()[num_tokens] = {workers, chunk_tokens};
            },
            py::arg("num_tokens"), py::arg("workers"), py::arg("chunk_tokens"), "Set workers and chunks of rounds of so many tokens.")
        .def("kept_bytes", &DispatchPlan::kept_bytes, py::arg("max_rows"), "Bytes of the block that combine and repeats need as well.")
        .def(
            "prepare",
            [](PreparedDispatch& plan, py::object kind, i32 rows, i32 most_rows, i32 groups, i32 rows_of_all, bool always_agrees) {
                plan.kind = std::move(kind);
                plan.rows = rows;
                plan.most_rows = most_rows;
                plan.groups = groups;
                plan.rows_of_all = rows_of_all;
                plan.always_agrees = always_agrees;
                plan.largest_bytes = plan.largest_kept_bytes(rows_of_all) + plan.largest_payload_bytes(rows_of_all);
            },
            py::arg("kind"), py::arg("rows"), py::arg("most_rows"), py::arg("groups"), py::arg("rows_of_all"), py::arg("always_agrees"),
            R"(Set what calls need beside tensors.

`kind`: theirs in the flight recorder.
`rows`: room for so many, unless `max_rows` is given; never more than `most_rows`.
`groups`: with `max_rows` each.
`rows_of_all`: `rows` of the rank that has the most.
`always_agrees`: all ranks have room for a round without `max_rows` before one with it, too.)")
        .def_readonly("rows", &PreparedDispatch::rows)
        .def_readonly("rows_of_all", &PreparedDispatch::rows_of_all)
        .def_readonly("always_agrees", &PreparedDispatch::always_agrees)
        .def_readonly("largest_bytes", &PreparedDispatch::largest_bytes,
                      "Bytes of both blocks on the rank that needs most, unless `max_rows` is given.")
        .def("largest_payload_bytes", &DispatchPlan::largest_payload_bytes, py::arg("max_rows"),
             "payload_bytes() of the rank with the most experts.")
        .def("payload_bytes", &DispatchPlan::payload_bytes, py::arg("max_rows"), "Bytes of the block for the rows that arrive.")
        .def(
            "bind",
            [](const PreparedDispatch& plan, const Block& payload, const Block& kept, i32 max_rows, py::handle x, py::handle scales,
               py::handle topk_idx, py::handle topk_weights) -> std::optional<DispatchArgs> {
                const DispatchTensors inputs(x, scales, topk_idx, topk_weights);
                if (!inputs.readable()) return std::nullopt;
                return plan.bind(payload, kept, max_rows, inputs.get());
            },
            py::arg("payload"), py::arg("kept"), py::arg("max_rows"), py::arg("x"), py::arg("scales"), py::arg("topk_idx"),
            py::arg("topk_weights"), R"(The arguments of a dispatch of these tensors.

None unless the plan is for such tensors, they can be used, and their number of tokens has a schedule.)")
        .def(
            "repeat",
            [](const PreparedDispatch& plan, const Block& payload, const DispatchArgs& earlier, py::handle x,
               py::handle scales) -> std::optional<DispatchArgs> {
                const DispatchTensors inputs(x, scales, py::none(), py::none());
                if (!inputs.readable()) return std::nullopt;
                return plan.repeat(payload, earlier, inputs.get());
            },
            py::arg("payload"), py::arg("earlier"), py::arg("x"), py::arg("scales"),
            "bind() with the route and the room of an earlier dispatch.")
        .def("flat_outputs", &flat_outputs, py::arg("args"), py::arg("payload"), py::arg("kept"), py::arg("owner"),
             R"(x, scales, topk_idx and topk_weights of a bound flat dispatch.  Each keeps its block and `owner`.

Raises:
    ValueError: another layout, or scales that dispatch makes or that go by column.)")
        .def(
            "rows_output",
            [](const PreparedDispatch& plan, const DispatchArgs& args, const std::shared_ptr<Block>& payload, const py::object& owner) {
                return Tensor(Tensors(plan, payload, owner)(plan.rows_output(args)));
            },
            py::arg("args"), py::arg("payload"), py::arg("owner"), "The rows of a bound dispatch of any layout.  See flat_outputs.")
        .def("expert_outputs", &expert_outputs, py::arg("args"), py::arg("payload"), py::arg("kept"), py::arg("owner"), py::arg("counted"),
             "x, scales and row_weights of a bound expert dispatch; `counted`: and rows_per_expert.  See flat_outputs.")
        .def("layer_outputs", &layer_outputs, py::arg("args"), py::arg("payload"), py::arg("kept"), py::arg("owner"),
             "x, scales and tokens_per_expert of an expert dispatch, also of rows cast to FP8.  See flat_outputs.")
        .def("batched_outputs", &batched_outputs, py::arg("args"), py::arg("payload"), py::arg("kept"), py::arg("owner"),
             "x and tokens_per_expert of a bound batched dispatch.  See flat_outputs.")
        .def("table_outputs", &table_outputs, py::arg("args"), py::arg("kept"), py::arg("owner"),
             R"(topk_weights (flat) or row_weights, src, tokens_per_expert, num_rows and, flat, topk_idx of a bound dispatch.

Each keeps its block and `owner`.)");
    bind_runs<PreparedDispatch, DispatchArgs>(plan);
}

void bind_combine_plan(py::module_& m) {
    py::class_<PreparedCombine> plan(m, "CombinePlan", "Combines of one kind, prepared; see DispatchPlan.");
    plan.def(py::init([](const CombineArgs& args, py::handle y, py::handle bias, py::handle weight_grads, py::handle topk_weights) {
                 const CombineArguments like(y, y, bias, weight_grads, py::none(), topk_weights);
                 require(like.readable());
                 return std::make_unique<PreparedCombine>(args, like.get());
             }),
             py::arg("args"), py::arg("y"), py::arg("bias"), py::arg("weight_grads"), py::arg("topk_weights") = py::none())
        .def(
            "schedule",
            [](PreparedCombine& plan, i32 num_tokens, i32 workers, i32 chunk_tokens, bool in_packets) {
                plan.schedules()[num_tokens] = {workers, chunk_tokens};
                plan.in_packets[num_tokens] = in_packets;
            },
            py::arg("num_tokens"), py::arg("workers"), py::arg("chunk_tokens"), py::arg("in_packets") = true,
            "Set workers and chunks of rounds of so many tokens; `in_packets`: their rows return in packets.")
        .def("reduced_bytes", &PreparedCombine::reduced_bytes, py::arg("dispatch"),
             "Bytes of a place for each reduced row; 0: they go through the ring, as few tokens do.")
        .def(
            "prepare",
            [](PreparedCombine& plan, py::object kind, u64 reduced_row_bytes, i32 most_reduced_rows, bool peers_read_weights,
               py::object like_out, py::object like_grads) {
                plan.kind = std::move(kind);
                plan.reduced_row_bytes = reduced_row_bytes;
                plan.most_reduced_rows = most_reduced_rows;
                plan.peers_read_weights = peers_read_weights;
                plan.like_out = std::move(like_out);
                plan.like_grads = std::move(like_grads);
            },
            py::arg("kind"), py::arg("reduced_row_bytes"), py::arg("most_reduced_rows"), py::arg("peers_read_weights"), py::arg("like_out"),
            py::arg("like_grads"), R"(Set what calls need beside tensors.

`kind`: theirs in the flight recorder.  `reduced_row_bytes`, `most_reduced_rows`: see reduced_bytes().
`peers_read_weights`: the weights of rows lie in the window.
`like_out`, `like_grads`: tensors whose new_empty() makes the outputs.)")
        .def(
            "bind",
            [](const PreparedCombine& plan, const DispatchArgs& dispatch, py::handle y, py::handle out, py::handle bias,
               py::handle weight_grads, py::handle out_weight_grads, u64 reduced_rows,
               py::handle topk_weights) -> std::optional<CombineArgs> {
                const CombineArguments tensors(y, out, bias, weight_grads, out_weight_grads, topk_weights);
                if (!tensors.readable()) return std::nullopt;
                return plan.bind(dispatch, tensors.get(), reduced_rows);
            },
            py::arg("dispatch"), py::arg("y"), py::arg("out"), py::arg("bias"), py::arg("weight_grads"), py::arg("out_weight_grads"),
            py::arg("reduced_rows") = 0, py::arg("topk_weights") = py::none(),
            "The arguments of a combine, or None: see DispatchPlan.bind.  `reduced_rows` is of CombineArgs.");
    bind_runs<PreparedCombine, CombineArgs>(plan);
}

}  // namespace

void bind_plans(py::module_& m) {
    bind_dispatch_plan(m);
    bind_combine_plan(m);
    m.def("tensor_words", &tensor_words, py::arg("tensors"), py::arg("addresses") = true,
          R"(Devices, dtypes, shapes, strides and addresses of torch's tensors, of which some may be None, as bytes to compare.

None if one is no dense tensor of torch, or its memory does not hold what it promises.)");
    m.def("current_stream", &current_stream, py::arg("device"), "torch's current stream of a GPU: a cudaStream_t.");
    m.def(
        "share_memory",
        [](py::handle a, py::handle b) {
            const Argument first(a), second(b);
            require(first.get() != nullptr && second.get() != nullptr && first.readable() && second.readable());
            return share_memory(*first.get(), *second.get());
        },
        py::arg("a"), py::arg("b"), "Return whether two tensors of contiguous rows have bytes in common.");
    m.def(
        "shares_tables",
        [](const DispatchArgs& dispatch, py::handle tensor) {
            const Argument argument(tensor);
            require(argument.get() != nullptr && argument.readable());
            return shares_tables(dispatch, *argument.get());
        },
        py::arg("dispatch"), py::arg("tensor"),
        "Return whether a tensor of contiguous rows has bytes in common with the tables or row weights of a dispatch.");
}

}  // namespace moecomm::bindings
