// torch through its C functions, without a header of its own.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "../runtime/operand.h"

namespace moecomm::bindings {

// An object that is a torch.Tensor, in signatures.
class Tensor : public pybind11::object {
  public:
    Tensor() = default;
    explicit Tensor(pybind11::object made) : object(std::move(made)) {}
};

// torch's tensors; looked up once and never dropped.
struct Torch {
    pybind11::object tensor = pybind11::module_::import("torch").attr("Tensor");
    const runtime::DLPackExchange* exchange = nullptr;

    Torch() {
        const pybind11::object capsule = tensor.attr(runtime::kExchangeAttribute);
        exchange = static_cast<const runtime::DLPackExchange*>(PyCapsule_GetPointer(capsule.ptr(), runtime::kExchangeCapsule));
        if (exchange == nullptr) throw pybind11::error_already_set();
        if (exchange->version.major != 1) throw std::runtime_error("torch's tensors speak another major version of DLPack");
    }
    static const Torch& instance() {
        static const Torch* const found = new Torch;
        return *found;
    }
};

// torch's current stream of a GPU, in a tenth of the time of torch.cuda.current_stream.
inline u64 current_stream(i32 device) {
    constexpr i32 kCudaDevice = 2;  // of DLPack
    void* stream = nullptr;
    if (Torch::instance().exchange->current_stream(kCudaDevice, device, &stream) != 0) throw pybind11::error_already_set();
    return reinterpret_cast<u64>(stream);
}

// True if a torch tensor's memory holds what its shape and dtype promise.  A storage that was resized later may be too small, and a view
// with the negative bit set stores its numbers with the other sign.
inline bool is_as_it_says(pybind11::handle object, const runtime::DLTensor& tensor) {
    static PyObject* const untyped_storage = PyUnicode_InternFromString("untyped_storage");
    static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
    static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
    const auto call = [](pybind11::handle self, PyObject* method) {
        return pybind11::reinterpret_steal<pybind11::object>(PyObject_CallMethodNoArgs(self.ptr(), method));
    };
    const pybind11::object negative = call(object, is_neg), storage = call(object, untyped_storage);
    const pybind11::object first = storage ? call(storage, data_ptr) : pybind11::object();
    if (!negative || !first) return PyErr_Clear(), false;
    const u64 begin = PyLong_AsUnsignedLongLong(first.ptr()), bytes = static_cast<u64>(PyObject_Size(storage.ptr()));
    return negative.ptr() == Py_False && runtime::is_inside(tensor, begin, bytes);
}

// A C-contiguous tensor at `address` in `block`, which keeps the block and `owner`.
Tensor torch_tensor(std::shared_ptr<runtime::Block> block, u64 address, std::vector<i64> shape, runtime::DLDataType type,
                    runtime::DLDevice device, pybind11::object owner);

}  // namespace moecomm::bindings

template <>
struct pybind11::detail::handle_type_name<moecomm::bindings::Tensor> {
    static constexpr auto name = const_name("torch.Tensor");
};
