#include "dlpack.h"

#include <stdexcept>
#include <string>
#include <type_traits>

namespace moecomm::runtime {
namespace {

constexpr DLPackVersion kVersion{1, 0};

template <class Managed>
struct Holder {
    Managed managed;
    std::shared_ptr<Block> block;
    std::vector<i64> shape, strides;
    std::function<void()> released;
};

template <class Managed>
void delete_tensor(Managed* managed) {
    auto* holder = static_cast<Holder<Managed>*>(managed->manager_ctx);
    if (holder->released) holder->released();
    delete holder;
}

// Strides of a C-contiguous tensor; a dimension of 0 counts as 1.
std::vector<i64> contiguous_strides(const std::vector<i64>& shape) {
    std::vector<i64> strides(shape.size());
    i64 step = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        strides[i] = step;
        step *= shape[i] > 0 ? shape[i] : 1;
    }
    return strides;
}

u64 tensor_bytes(const std::vector<i64>& shape, u64 element_bytes) {
    u64 bytes = element_bytes;
    bool overflow = false;
    for (const i64 size : shape) {
        if (size < 0) throw std::invalid_argument("the shape of a tensor has a negative dimension");
        overflow |= __builtin_mul_overflow(bytes, static_cast<u64>(size > 0 ? size : 1), &bytes);
    }
    if (overflow) throw std::invalid_argument("the shape of a tensor is too large");
    for (const i64 size : shape)
        if (size == 0) return 0;
    return bytes;
}

}  // namespace

template <class Managed>
Managed* make_tensor(std::shared_ptr<Block> block, u64 address, std::vector<i64> shape, DLDataType type, DLDevice device,
                     std::function<void()> released) {
    if (type.bits == 0 || type.bits % 8 != 0) throw std::invalid_argument("a tensor's elements have whole bytes");
    const u64 bytes = tensor_bytes(shape, type.bits / 8);
    if (bytes > block->bytes())
        throw std::invalid_argument("a tensor of " + std::to_string(bytes) + " bytes does not fit a block of " +
                                    std::to_string(block->bytes()));
    auto holder = std::make_unique<Holder<Managed>>();
    holder->block = std::move(block);
    holder->strides = contiguous_strides(shape);
    holder->shape = std::move(shape);
    holder->released = std::move(released);
    const i32 ndim = static_cast<i32>(holder->shape.size());
    void* data = reinterpret_cast<void*>(address);
    Managed& managed = holder->managed;
    managed = Managed{};
    managed.dl_tensor = {data, device, ndim, type, holder->shape.data(), holder->strides.data(), 0};
    managed.manager_ctx = holder.get();
    managed.deleter = delete_tensor<Managed>;
    if constexpr (std::is_same_v<Managed, DLManagedTensorVersioned>) managed.version = kVersion;
    return &holder.release()->managed;
}

template DLManagedTensor* make_tensor(std::shared_ptr<Block>, u64, std::vector<i64>, DLDataType, DLDevice, std::function<void()>);
template DLManagedTensorVersioned* make_tensor(std::shared_ptr<Block>, u64, std::vector<i64>, DLDataType, DLDevice, std::function<void()>);

}  // namespace moecomm::runtime
