// torch through its C functions, without a header of its own.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "runtime/dlpack.h"

namespace moecomm::bindings {

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

// A C-contiguous tensor at `address` in `block`, which keeps the block and `owner`.
pybind11::object torch_tensor(std::shared_ptr<runtime::Block> block, u64 address, std::vector<i64> shape, runtime::DLDataType type,
                              runtime::DLDevice device, pybind11::object owner);

}  // namespace moecomm::bindings
