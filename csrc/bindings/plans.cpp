// Rounds prepared in one call: torch's tensors are read through their C functions, where Python would look up each attribute.
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <optional>
#include <stdexcept>

#include "../runtime/combine_plan.h"
#include "../runtime/dispatch_plan.h"
#include "module.h"
#include "torch.h"

namespace py = pybind11;
using namespace moecomm::runtime;

namespace moecomm::bindings {
namespace {

constexpr i32 kCudaDevice = 2;  // of DLPack

// An argument that is a torch tensor, None, or something else, which then has to be looked at in Python.
class Argument {
  public:
    explicit Argument(py::handle object) {
        if (object.is_none()) return;
        const Torch& torch = Torch::instance();
        given_ = true;
        readable_ = PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(torch.tensor.ptr())) != 0 &&
                    torch.exchange->tensor_from_object(object.ptr(), &tensor_) == 0;
        if (!readable_) PyErr_Clear();
        // torch has zeros without memory.
        readable_ = readable_ && (is_empty(tensor_) || (tensor_.data != nullptr && is_as_it_says(object, tensor_)));
    }
    bool readable() const { return !given_ || readable_; }
    const DLTensor* get() const { return given_ ? &tensor_ : nullptr; }

  private:
    bool given_ = false, readable_ = false;
    DLTensor tensor_{};
};

class DispatchTensors {
  public:
    DispatchTensors(py::handle x, py::handle scales, py::handle topk_idx, py::handle topk_weights)
        : x_(x), scales_(scales), topk_idx_(topk_idx), topk_weights_(topk_weights) {}
    bool readable() const { return x_.readable() && scales_.readable() && topk_idx_.readable() && topk_weights_.readable(); }
    DispatchInputs get() const { return {x_.get(), scales_.get(), topk_idx_.get(), topk_weights_.get()}; }

  private:
    Argument x_, scales_, topk_idx_, topk_weights_;
};

class CombineArguments {
  public:
    CombineArguments(py::handle y, py::handle out, py::handle bias, py::handle weight_grads, py::handle out_weight_grads,
                     py::handle topk_weights)
        : y_(y), out_(out), bias_(bias), weight_grads_(weight_grads), out_weight_grads_(out_weight_grads), topk_weights_(topk_weights) {}
    bool readable() const {
        return y_.readable() && out_.readable() && bias_.readable() && weight_grads_.readable() && out_weight_grads_.readable() &&
               topk_weights_.readable();
    }
    CombineTensors get() const {
        return {y_.get(), out_.get(), bias_.get(), weight_grads_.get(), out_weight_grads_.get(), topk_weights_.get()};
    }

  private:
    Argument y_, out_, bias_, weight_grads_, out_weight_grads_, topk_weights_;
};

void require(bool readable) {
    if (!readable) throw std::invalid_argument("not torch tensors");
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
py::typing::Tuple<Tensor, std::optional<Tensor>, Tensor, Tensor> flat_outputs(const DispatchPlan& plan, const DispatchArgs& args,
                                                                              const std::shared_ptr<Block>& payload,
                                                                              const std::shared_ptr<Block>& kept, const py::object& owner) {
    const FlatOutputs out = plan.flat_outputs(args);
    const Tensors arriving(plan, payload, owner), staying(plan, kept, owner);
    const py::object scales = out.scales ? arriving(*out.scales) : py::none();
    return py::make_tuple(arriving(out.x), scales, staying(out.topk_idx), staying(out.topk_weights));
}

// x, scales or None, and row_weights; `counted`: and rows_per_expert.
py::typing::Tuple<std::optional<Tensor>, py::ellipsis> expert_outputs(const DispatchPlan& plan, const DispatchArgs& args,
                                                                      const std::shared_ptr<Block>& payload,
                                                                      const std::shared_ptr<Block>& kept, const py::object& owner,
                                                                      bool counted) {
    const ExpertOutputs out = plan.expert_outputs(args);
    const Tensors arriving(plan, payload, owner), staying(plan, kept, owner);
    const py::object scales = out.scales ? arriving(*out.scales) : py::none();
    if (!counted) return py::make_tuple(arriving(out.x), scales, staying(out.row_weights));
    return py::make_tuple(arriving(out.x), scales, staying(out.row_weights), staying(out.rows_per_expert));
}

// x and tokens_per_expert.
py::typing::Tuple<Tensor, Tensor> batched_outputs(const DispatchPlan& plan, const DispatchArgs& args, const std::shared_ptr<Block>& payload,
                                                  const std::shared_ptr<Block>& kept, const py::object& owner) {
    const BatchedOutputs out = plan.batched_outputs(args);
    return py::make_tuple(Tensors(plan, payload, owner)(out.x), Tensors(plan, kept, owner)(out.tokens_per_expert));
}

void bind_dispatch_plan(py::module_& m) {
    py::class_<DispatchPlan>(m, "DispatchPlan", R"(Dispatches of one kind, prepared.  `args` has everything but tensors and outputs.

x, scales, topk_idx and topk_weights have the types, and are on the devices, of those of later calls.

Raises:
    ValueError: an argument in the place of a tensor is none of torch's.)")
        .def(py::init([](const DispatchArgs& args, bool scale_columns, py::handle x, py::handle scales, py::handle topk_idx,
                         py::handle topk_weights) {
                 const DispatchTensors like(x, scales, topk_idx, topk_weights);
                 require(like.readable());
                 return DispatchPlan(args, scale_columns, like.get());
             }),
             py::arg("args"), py::arg("scale_columns"), py::arg("x"), py::arg("scales"), py::arg("topk_idx"), py::arg("topk_weights"))
        .def(
            "schedule",
            [](DispatchPlan& plan, i32 num_tokens, i32 workers, i32 chunk_tokens) {
                plan.schedules()[num_tokens] = {workers, chunk_tokens};
            },
            py::arg("num_tokens"), py::arg("workers"), py::arg("chunk_tokens"), "Set workers and chunks of rounds of so many tokens.")
        .def("kept_bytes", &DispatchPlan::kept_bytes, py::arg("max_rows"), "Bytes of the block that combine and repeats need as well.")
        .def("payload_bytes", &DispatchPlan::payload_bytes, py::arg("max_rows"), "Bytes of the block for the rows that arrive.")
        .def(
            "bind",
            [](const DispatchPlan& plan, const Block& payload, const Block& kept, i32 max_rows, py::handle x, py::handle scales,
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
            [](const DispatchPlan& plan, const Block& payload, const DispatchArgs& earlier, py::handle x,
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
        .def("expert_outputs", &expert_outputs, py::arg("args"), py::arg("payload"), py::arg("kept"), py::arg("owner"), py::arg("counted"),
             "x, scales and row_weights of a bound expert dispatch; `counted`: and rows_per_expert.  See flat_outputs.")
        .def("batched_outputs", &batched_outputs, py::arg("args"), py::arg("payload"), py::arg("kept"), py::arg("owner"),
             "x and tokens_per_expert of a bound batched dispatch.  See flat_outputs.");
}

void bind_combine_plan(py::module_& m) {
    py::class_<CombinePlan>(m, "CombinePlan", "Combines of one kind, prepared; see DispatchPlan.")
        .def(py::init([](const CombineArgs& args, py::handle y, py::handle bias, py::handle weight_grads, py::handle topk_weights) {
                 const CombineArguments like(y, y, bias, weight_grads, py::none(), topk_weights);
                 require(like.readable());
                 return CombinePlan(args, like.get());
             }),
             py::arg("args"), py::arg("y"), py::arg("bias"), py::arg("weight_grads"), py::arg("topk_weights") = py::none())
        .def(
            "schedule",
            [](CombinePlan& plan, i32 num_tokens, i32 workers, i32 chunk_tokens) {
                plan.schedules()[num_tokens] = {workers, chunk_tokens};
            },
            py::arg("num_tokens"), py::arg("workers"), py::arg("chunk_tokens"), "Set workers and chunks of rounds of so many tokens.")
        .def(
            "bind",
            [](const CombinePlan& plan, const DispatchArgs& dispatch, py::handle y, py::handle out, py::handle bias,
               py::handle weight_grads, py::handle out_weight_grads, u64 reduced_rows,
               py::handle topk_weights) -> std::optional<CombineArgs> {
                const CombineArguments tensors(y, out, bias, weight_grads, out_weight_grads, topk_weights);
                if (!tensors.readable()) return std::nullopt;
                return plan.bind(dispatch, tensors.get(), reduced_rows);
            },
            py::arg("dispatch"), py::arg("y"), py::arg("out"), py::arg("bias"), py::arg("weight_grads"), py::arg("out_weight_grads"),
            py::arg("reduced_rows") = 0, py::arg("topk_weights") = py::none(),
            "The arguments of a combine, or None: see DispatchPlan.bind.  `reduced_rows` is of CombineArgs.");
}

// torch's current stream of a GPU, in a tenth of the time of torch.cuda.current_stream.
u64 current_stream(i32 device) {
    void* stream = nullptr;
    if (Torch::instance().exchange->current_stream(kCudaDevice, device, &stream) != 0) throw py::error_already_set();
    return reinterpret_cast<u64>(stream);
}

}  // namespace

void bind_plans(py::module_& m) {
    bind_dispatch_plan(m);
    bind_combine_plan(m);
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
