// Tensors that are arguments of rounds: read through torch's C functions, where Python would look up each attribute.
#pragma once
#include "../runtime/combine_plan.h"
#include "../runtime/dispatch_plan.h"
#include "torch.h"

namespace moecomm::bindings {

// An argument that is a torch tensor, None, or something else, which then has to be looked at in Python.
class Argument {
  public:
    explicit Argument(pybind11::handle object) {
        if (object.is_none()) return;
        const Torch& torch = Torch::instance();
        given_ = true;
        readable_ = PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(torch.tensor.ptr())) != 0 &&
                    torch.exchange->tensor_from_object(object.ptr(), &tensor_) == 0;
        if (!readable_) PyErr_Clear();
        // torch has zeros without memory.
        readable_ = readable_ && (runtime::is_empty(tensor_) || (tensor_.data != nullptr && is_as_it_says(object, tensor_)));
    }
    bool readable() const { return !given_ || readable_; }
    const runtime::DLTensor* get() const { return given_ ? &tensor_ : nullptr; }

  private:
    bool given_ = false, readable_ = false;
    runtime::DLTensor tensor_{};
};

class DispatchTensors {
  public:
    DispatchTensors(pybind11::handle x, pybind11::handle scales, pybind11::handle topk_idx, pybind11::handle topk_weights)
        : x_(x), scales_(scales), topk_idx_(topk_idx), topk_weights_(topk_weights) {}
    bool readable() const { return x_.readable() && scales_.readable() && topk_idx_.readable() && topk_weights_.readable(); }
    runtime::DispatchInputs get() const { return {x_.get(), scales_.get(), topk_idx_.get(), topk_weights_.get()}; }

  private:
    Argument x_, scales_, topk_idx_, topk_weights_;
};

class CombineArguments {
  public:
    CombineArguments(pybind11::handle y, pybind11::handle out, pybind11::handle bias, pybind11::handle weight_grads,
                     pybind11::handle out_weight_grads, pybind11::handle topk_weights)
        : y_(y), out_(out), bias_(bias), weight_grads_(weight_grads), out_weight_grads_(out_weight_grads), topk_weights_(topk_weights) {}
    bool readable() const {
        return y_.readable() && out_.readable() && bias_.readable() && weight_grads_.readable() && out_weight_grads_.readable() &&
               topk_weights_.readable();
    }
    runtime::CombineTensors get() const {
        return {y_.get(), out_.get(), bias_.get(), weight_grads_.get(), out_weight_grads_.get(), topk_weights_.get()};
    }

  private:
    Argument y_, out_, bias_, weight_grads_, out_weight_grads_, topk_weights_;
};

}  // namespace moecomm::bindings
