// CUDA driver functions of the plugin, looked up at first use: the plugin builds and runs without CUDA.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace moecomm::rma::cuda {

using Pointer = unsigned long long;  // CUdeviceptr
using Handle = unsigned long long;   // CUmemGenericAllocationHandle

constexpr int kNotReady = 600;            // CUDA_ERROR_NOT_READY
constexpr int kPinned = 1, kPosixFd = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kOnDevice = 1;              // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kReadWrite = 3;             // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr int kRelaxed = 2;               // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned kNonBlocking = 1;      // CU_STREAM_NON_BLOCKING
constexpr unsigned kNoTiming = 2;         // CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortable = 1;         // CU_MEMHOSTALLOC_PORTABLE

struct Location {  // CUmemLocation
    int type;
    int id;
};
struct Properties {  // CUmemAllocationProp
    int type;
    int handle_types;
    Location location;
    void* windows_metadata;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};
struct Access {  // CUmemAccessDesc
    Location location;
    int flags;
};
constexpr int kUnified = 4;  // CU_MEMORYTYPE_UNIFIED: the driver infers the type from the address
struct Side {
    size_t x = 0, y = 0;
    int type = kUnified;
    const void* host = nullptr;
    Pointer at = 0;
    void* array = nullptr;
    size_t pitch = 0;
};
struct Rows {  // CUDA_MEMCPY2D
    Side from, to;
    size_t bytes = 0, rows = 0;
};
static_assert(sizeof(Properties) == 32 && sizeof(Access) == 12 && sizeof(Rows) == 128, "cuda.h on 64 bits");

struct Driver {
    int (*error_name)(int, const char**);
    int (*get_context)(void** context);
    int (*create_context)(void** context, unsigned flags, int device);
    int (*destroy_context)(void* context);
    int (*push_context)(void* context);
    int (*pop_context)(void** context);
    int (*get_device)(int* device);
    int (*exchange_capture_mode)(int* mode);
    int (*priorities)(int* least, int* greatest);
    int (*create_stream)(void** stream, unsigned flags, int priority);
    int (*destroy_stream)(void* stream);
    int (*create_event)(void** event, unsigned flags);
    int (*destroy_event)(void* event);
    int (*record)(void* event, void* stream);
    int (*query)(void* event);
    int (*copy)(Pointer to, Pointer from, size_t bytes, void* stream);
    int (*copy_rows)(const Rows* rows, void* stream);
    int (*write_word)(void* stream, Pointer at, uint64_t value, unsigned flags);
    int (*pin)(void** memory, size_t bytes, unsigned flags);
    int (*unpin)(void* memory);
    int (*address_range)(Pointer* base, size_t* bytes, Pointer at);
    int (*retain)(Handle* handle, void* at);
    int (*properties)(Properties* properties, Handle handle);
    int (*export_handle)(void* fd, Handle handle, int type, unsigned long long flags);
    int (*import_handle)(Handle* handle, void* fd, int type);
    int (*reserve)(Pointer* at, size_t bytes, size_t alignment, Pointer wish, unsigned long long flags);
    int (*unreserve)(Pointer at, size_t bytes);
    int (*map)(Pointer at, size_t bytes, size_t offset, Handle handle, unsigned long long flags);
    int (*unmap)(Pointer at, size_t bytes);
    int (*set_access)(Pointer at, size_t bytes, const Access* access, size_t count);
    int (*release)(Handle handle);
};

const Driver* driver();                        // null: no driver, or one that is too old
std::string error_name(int result);            // CUDA_ERROR_...
void check(int result, const char* function);  // throws Failure(kCuda)

}  // namespace moecomm::rma::cuda
