#include "driver.h"

#include <dlfcn.h>

#include "failure.h"

namespace moecomm::rma::cuda {
namespace {

struct Loaded {
    Driver table{};
    bool complete = false;

    Loaded() {
        library_ = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library_ == nullptr) return;
        complete = true;
        find("cuGetErrorName", table.error_name);
        find("cuCtxGetCurrent", table.get_context);
        find("cuCtxCreate_v2", table.create_context);
        find("cuCtxDestroy_v2", table.destroy_context);
        find("cuCtxPushCurrent_v2", table.push_context);
        find("cuCtxPopCurrent_v2", table.pop_context);
        find("cuCtxGetDevice", table.get_device);
        find("cuThreadExchangeStreamCaptureMode", table.exchange_capture_mode);
        find("cuCtxGetStreamPriorityRange", table.priorities);
        find("cuStreamCreateWithPriority", table.create_stream);
        find("cuStreamDestroy_v2", table.destroy_stream);
        find("cuEventCreate", table.create_event);
        find("cuEventDestroy_v2", table.destroy_event);
        find("cuEventRecord", table.record);
        find("cuEventQuery", table.query);
        find("cuMemcpyAsync", table.copy);
        find("cuMemcpy2DAsync_v2", table.copy_rows);
        find("cuStreamWriteValue64_v2", table.write_word);
        find("cuMemHostAlloc", table.pin);
        find("cuMemFreeHost", table.unpin);
        find("cuMemGetAddressRange_v2", table.address_range);
        find("cuMemRetainAllocationHandle", table.retain);
        find("cuMemGetAllocationPropertiesFromHandle", table.properties);
        find("cuMemExportToShareableHandle", table.export_handle);
        find("cuMemImportFromShareableHandle", table.import_handle);
        find("cuMemAddressReserve", table.reserve);
        find("cuMemAddressFree", table.unreserve);
        find("cuMemMap", table.map);
        find("cuMemUnmap", table.unmap);
        find("cuMemSetAccess", table.set_access);
        find("cuMemRelease", table.release);
    }

  private:
    template <class Function>
    void find(const char* name, Function& function) {
        function = reinterpret_cast<Function>(::dlsym(library_, name));
        if (function == nullptr) complete = false;
    }

    void* library_ = nullptr;
};

}  // namespace

const Driver* driver() {
    static const Loaded loaded;
    return loaded.complete ? &loaded.table : nullptr;
}

std::string error_name(int result) {
    const char* name = nullptr;
    const Driver* cuda = driver();
    if (cuda != nullptr && cuda->error_name(result, &name) == 0 && name != nullptr) return name;
    return "CUDA error " + std::to_string(result);
}

void check(int result, const char* function) {
    if (result != 0) throw Failure(Fault::kCuda, std::string(function) + " returned " + error_name(result));
}

}  // namespace moecomm::rma::cuda
