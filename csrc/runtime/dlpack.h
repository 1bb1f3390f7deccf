// DLPack structs of versions 0.x (capsule "dltensor") and 1.x.  Declared here so that the build needs no DLPack header; the DLPack
// specification fixes the layout.
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

// The C exchange API of DLPack 1.3: a tensor type's attribute kExchangeAttribute is a capsule kExchangeCapsule with this struct.  The
// functions need the GIL; they return 0 on success, else a Python exception is set.
constexpr const char* kExchangeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";
struct DLPackExchange {
    DLPackVersion version;
    const DLPackExchange* older;  // null, or of an earlier major version
    void (*allocate)();           // this and the next are unused and declared only for the layout
    void (*managed_from_object)();
    int (*managed_to_object)(DLManagedTensorVersioned* managed, void** object);  // takes ownership of `managed`
    int (*tensor_from_object)(void* object, DLTensor* tensor);                   // borrowed: valid as long as the object lives
    int (*current_stream)(i32 device_type, i32 device_id, void** stream);
};
static_assert(sizeof(DLPackExchange) == 56, "the ABI of DLPack on 64 bits");

// Make a C-contiguous tensor at `address` that keeps `block` alive; its deleter calls `released` once.  The caller owns the result and must
// call its deleter.  Throws std::invalid_argument if the shape is invalid or needs more bytes than the block has.
template <class Managed>  // DLManagedTensor or DLManagedTensorVersioned
Managed* make_tensor(std::shared_ptr<Block> block, u64 address, std::vector<i64> shape, DLDataType type, DLDevice device,
                     std::function<void()> released);

}  // namespace moecomm::runtime
