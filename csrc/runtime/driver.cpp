#include "driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace moecomm::runtime {
namespace {

using Result = int;  // CUresult; 0 is success

struct Driver {
    Result (*init)(unsigned) = nullptr;
    Result (*device_count)(int*) = nullptr;
    Result (*error_name)(Result, const char**) = nullptr;
    Result (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                            unsigned block_z, unsigned shared_bytes, void* stream, void** params, void** extra) = nullptr;
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

}  // namespace

std::string cuda_missing() {
    const Driver& cuda = driver();
    if (!cuda.missing.empty()) return cuda.missing;
    if (const Result result = cuda.init(0)) return "The NVIDIA driver does not start: cuInit returned " + cuda.name_of(result) + ".";
    int devices = 0;
    if (const Result result = cuda.device_count(&devices)) return "cuDeviceGetCount returned " + cuda.name_of(result) + ".";
    return devices > 0 ? "" : "The NVIDIA driver sees no GPU.";
}

void cuda_launch(const Launch& launch, const void* args) {
    const Driver& cuda = driver();
    if (!cuda.missing.empty()) throw std::runtime_error(cuda.missing);
    void* params[] = {const_cast<void*>(args)};
    const Result result = cuda.launch_kernel(reinterpret_cast<void*>(launch.function), launch.grid, 1, 1, launch.block, 1, 1,
                                             launch.shared_bytes, reinterpret_cast<void*>(launch.stream), params, nullptr);
    if (result != 0) throw std::runtime_error("cuLaunchKernel returned " + cuda.name_of(result));
}

}  // namespace moecomm::runtime
