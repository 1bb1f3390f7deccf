// DLPack 0.x: the struct that array libraries take from a capsule called "dltensor".  Declared here so that nothing else is needed to
// build; the layout is fixed by the DLPack specification.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "../protocol/compiler.h"
#include "arena.h"

namespace moecomm::runtime {

struct DLDevice {
    i32 device_type;  // 1: CPU, 2: CUDA
    i32 device_id;
};
struct DLDataType {
    u8 code;  // 0: int, 1: unsigned, 2: float, 4: bfloat, 6: bool, 10: e4m3fn
    u8 bits;
    u16 lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    i32 ndim;
    DLDataType dtype;
    i64* shape;
    i64* strides;  // in elements
    u64 byte_offset;
};
struct DLManagedTensor {
    DLTensor dl_tensor;
    void* manager_ctx;
    void (*deleter)(DLManagedTensor*);
};
static_assert(sizeof(DLDataType) == 4 && sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64, "the ABI of DLPack on 64 bits");

// DLPack 1.3: what a type of tensors offers to C in the capsule kExchangeCapsule, its attribute kExchangeAttribute.  The functions need
// the GIL; 0 is success, else a Python exception is set.
constexpr const char* kExchangeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";
struct DLPackExchange {
    u32 major, minor;
    const DLPackExchange* older;  // null, or of an earlier major version
    void (*allocate)();           // this and the next two are not used here, and declared for their place alone
    void (*managed_from_object)();
    void (*managed_to_object)();
    int (*tensor_from_object)(void* object, DLTensor* tensor);  // borrowed: valid as long as the object is
    int (*current_stream)(i32 device_type, i32 device_id, void** stream);
};
static_assert(sizeof(DLPackExchange) == 56, "the ABI of DLPack on 64 bits");

// A C-contiguous tensor at `address` that keeps `block`; `released` is called once, by the deleter.  Whoever holds the result calls its
// deleter.  Throws std::invalid_argument if the shape is not one or needs more bytes than the block has.
DLManagedTensor* make_tensor(std::shared_ptr<Block> block, u64 address, std::vector<i64> shape, DLDataType type, DLDevice device,
                             std::function<void()> released);

}  // namespace moecomm::runtime
