// DLPack: the structs that array libraries take, that of 0.x from a capsule called "dltensor".  Declared here so that nothing else is
// needed to build; the layout is fixed by the DLPack specification.
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
struct DLPackVersion {
    u32 major, minor;
};
struct DLManagedTensorVersioned {  // of DLPack 1
    DLPackVersion version;
    void* manager_ctx;
    void (*deleter)(DLManagedTensorVersioned*);
    u64 flags;
    DLTensor dl_tensor;
};
static_assert(sizeof(DLManagedTensorVersioned) == 80 && sizeof(DLDataType) == 4 && sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64,
              "the ABI of DLPack on 64 bits");

// DLPack 1.3: what a type of tensors offers to C in the capsule kExchangeCapsule, its attribute kExchangeAttribute.  The functions need
// the GIL; 0 is success, else a Python exception is set.
constexpr const char* kExchangeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";
struct DLPackExchange {
    DLPackVersion version;
    const DLPackExchange* older;  // null, or of an earlier major version
    void (*allocate)();           // this and the next are not used here, and declared for their place alone
    void (*managed_from_object)();
    int (*managed_to_object)(DLManagedTensorVersioned* managed, void** object);  // takes `managed`
    int (*tensor_from_object)(void* object, DLTensor* tensor);                   // borrowed: valid as long as the object is
    int (*current_stream)(i32 device_type, i32 device_id, void** stream);
};
static_assert(sizeof(DLPackExchange) == 56, "the ABI of DLPack on 64 bits");

// A C-contiguous tensor at `address` that keeps `block`; `released` is called once, by the deleter.  Whoever holds the result calls its
// deleter.  Throws std::invalid_argument if the shape is not one or needs more bytes than the block has.
template <class Managed>  // DLManagedTensor or DLManagedTensorVersioned
Managed* make_tensor(std::shared_ptr<Block> block, u64 address, std::vector<i64> shape, DLDataType type, DLDevice device,
                     std::function<void()> released);

}  // namespace moecomm::runtime
