#include "driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace moecomm::runtime {
namespace {

using Result = int;  // CUresult; 0 is success

// CUlaunchAttribute and CUlaunchConfig of cuda.h, as far as they are used here.
struct LaunchAttribute {
    i32 id;
    i32 pad;
    union {
        i32 allowed;
        u32 cluster[3];
        char room[64];
    } value;
};
struct LaunchConfig {
    u32 grid[3], block[3];
    u32 shared_bytes;
    void* stream;
    LaunchAttribute* attributes;
    u32 attribute_count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "the ABI of the driver on 64 bits");
constexpr i32 kClusterDimension = 4, kProgrammaticStreamSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_...

struct Driver {
    Result (*init)(unsigned) = nullptr;
    Result (*device_count)(int*) = nullptr;
    Result (*error_name)(Result, const char**) = nullptr;
    Result (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                            unsigned block_z, unsigned shared_bytes, void* stream, void** params, void** extra) = nullptr;
    Result (*launch_kernel_ex)(const LaunchConfig*, void* function, void** params, void** extra) = nullptr;  // null before CUDA 11.8
    Result (*get_context)(void** context) = nullptr;
    Result (*is_capturing)(void* stream, int* status) = nullptr;
    std::string missing;  // empty if all of the above is there

    Driver() {
        void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            missing = "The NVIDIA driver is not installed: libcuda.so.1 was not found.";
            return;
        }
        find(library, "cuInit", init);
        find(library, "cuDeviceGetCount", device_count);
        find(library, "cuGetErrorName", error_name);
        find(library, "cuLaunchKernel", launch_kernel);
        find(library, "cuCtxGetCurrent", get_context);
        find(library, "cuStreamIsCapturing", is_capturing);
        launch_kernel_ex = reinterpret_cast<decltype(launch_kernel_ex)>(::dlsym(library, "cuLaunchKernelEx"));
    }

    template <class Function>
    void find(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(::dlsym(library, name));
        if (function == nullptr && missing.empty()) missing = std::string("The NVIDIA driver is too old: it has no ") + name + ".";
    }

    std::string name_of(Result result) const {
        const char* name = nullptr;
        return error_name(result, &name) == 0 && name != nullptr ? name : "CUDA error " + std::to_string(result);
    }
};

const Driver& driver() {
    static const Driver loaded;
    return loaded;
}

const Driver& usable() {
    const Driver& cuda = driver();
    if (!cuda.missing.empty()) throw std::runtime_error(cuda.missing);
    return cuda;
}

void check(Result result, const char* function) {
    if (result != 0) throw std::runtime_error(std::string(function) + " returned " + driver().name_of(result));
}

}  // namespace

std::string cuda_missing() {
    const Driver& cuda = driver();
    if (!cuda.missing.empty()) return cuda.missing;
    if (const Result result = cuda.init(0)) return "The NVIDIA driver does not start: cuInit returned " + cuda.name_of(result) + ".";
    int devices = 0;
    if (const Result result = cuda.device_count(&devices)) return "cuDeviceGetCount returned " + cuda.name_of(result) + ".";
    return devices > 0 ? "" : "The NVIDIA driver sees no GPU.";
}

u64 cuda_context() {
    void* context = nullptr;
    check(usable().get_context(&context), "cuCtxGetCurrent");
    return reinterpret_cast<u64>(context);
}

bool cuda_capturing(u64 stream) {
    int status = 0;
    check(usable().is_capturing(reinterpret_cast<void*>(stream), &status), "cuStreamIsCapturing");
    return status != 0;
}

void cuda_launch(const Launch& launch, const void* args) {
    const Driver& cuda = usable();
    void* params[] = {const_cast<void*>(args)};
    auto* function = reinterpret_cast<void*>(launch.function);
    auto* stream = reinterpret_cast<void*>(launch.stream);
    if ((!launch.overlap && launch.cluster == 1) || cuda.launch_kernel_ex == nullptr) {
        check(cuda.launch_kernel(function, launch.grid, 1, 1, launch.block, 1, 1, launch.shared_bytes, stream, params, nullptr),
              "cuLaunchKernel");
        return;
    }
    LaunchAttribute attributes[2] = {};
    u32 count = 0;
    if (launch.overlap) {
        attributes[count].id = kProgrammaticStreamSerialization;
        attributes[count++].value.allowed = 1;
    }
    if (launch.cluster > 1) {
        LaunchAttribute& cluster = attributes[count++];
        cluster.id = kClusterDimension;
        cluster.value.cluster[0] = launch.cluster;
        cluster.value.cluster[1] = cluster.value.cluster[2] = 1;
    }
    const LaunchConfig config{{launch.grid, 1, 1}, {launch.block, 1, 1}, launch.shared_bytes, stream, attributes, count};
    check(cuda.launch_kernel_ex(&config, function, params, nullptr), "cuLaunchKernelEx");
}

}  // namespace moecomm::runtime
