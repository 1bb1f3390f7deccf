#include "gpu.h"

#include <cstdint>
#include <map>
#include <mutex>

#include "failure.h"
#include "times.h"

namespace moecomm::rma {
namespace {

constexpr size_t kMostPitch = size_t{1} << 30;  // half of what drivers allow

}  // namespace

std::shared_ptr<Gpu> Gpu::current() {
    const cuda::Driver* cuda = cuda::driver();
    void* context = nullptr;
    int device = 0;
    if (cuda == nullptr || cuda->get_context(&context) != 0 || context == nullptr) return nullptr;
    cuda::check(cuda->get_device(&device), "cuCtxGetDevice");
    static std::mutex mutex;
    static std::map<int, std::weak_ptr<Gpu>> known;
    const std::lock_guard<std::mutex> lock(mutex);
    if (auto found = known[device].lock()) return found;
    void* popped = nullptr;
    cuda::check(cuda->create_context(&context, 0, device), "cuCtxCreate");
    std::shared_ptr<Gpu> made(new Gpu(*cuda, context, device));
    cuda::check(cuda->pop_context(&popped), "cuCtxPopCurrent");
    known[device] = made;
    return made;
}

void* Gpu::create_stream() {
    int least = 0, greatest = 0;
    void* stream = nullptr;
    cuda::check(cuda_.priorities(&least, &greatest), "cuCtxGetStreamPriorityRange");
    cuda::check(cuda_.create_stream(&stream, cuda::kNonBlocking, greatest), "cuStreamCreateWithPriority");
    return stream;
}

void* Gpu::create_event() {
    void* event = nullptr;
    cuda::check(cuda_.create_event(&event, cuda::kNoTiming), "cuEventCreate");
    return event;
}

bool Gpu::ended(void* event) {
    const times::Driver timed;
    const int result = cuda_.query(event);
    if (result == cuda::kNotReady) return false;
    cuda::check(result, "cuEventQuery");
    return true;
}

void Gpu::record(void* event, void* stream) {
    const times::Driver timed;
    cuda::check(cuda_.record(event, stream), "cuEventRecord");
}

// The driver may hand a plain copy, or some of its bytes, to the compute engine. While a kernel of another context runs and more work is
// queued behind it, this context gets that engine for a slice of time every 2.1 ms (H100, driver 580), and the kernel may be waiting for
// these very bytes. Copies of two rows go to a copy engine, whatever their size.
void Gpu::copy(void* to, const void* from, size_t bytes, void* stream) {
    if (bytes < 2 || bytes / 2 > kMostPitch) {
        const times::Driver timed;
        return cuda::check(cuda_.copy(reinterpret_cast<cuda::Pointer>(to), reinterpret_cast<cuda::Pointer>(from), bytes, stream),
                           "cuMemcpyAsync");
    }
    copy_in_two(to, from, bytes / 2, stream);
    if (bytes % 2 != 0) copy_in_two(static_cast<char*>(to) + bytes - 2, static_cast<const char*>(from) + bytes - 2, 1, stream);
}

void Gpu::copy_in_two(void* to, const void* from, size_t half, void* stream) {
    const times::Driver timed;
    cuda::Rows rows;
    rows.from.at = reinterpret_cast<cuda::Pointer>(from);
    rows.to.at = reinterpret_cast<cuda::Pointer>(to);
    rows.from.pitch = rows.to.pitch = rows.bytes = half;
    rows.rows = 2;
    cuda::check(cuda_.copy_rows(&rows, stream), "cuMemcpy2DAsync");
}

void Gpu::write_word(void* to, uint64_t value, void* stream) {
    const times::Driver timed;
    cuda::check(cuda_.write_word(stream, reinterpret_cast<cuda::Pointer>(to), value, 0), "cuStreamWriteValue64");
}

void* Gpu::pin(size_t bytes) {
    void* memory = nullptr;
    cuda::check(cuda_.pin(&memory, bytes, cuda::kPortable), "cuMemHostAlloc");
    return memory;
}

Gpu::Exported Gpu::export_window(void* at, size_t bytes) {
    Exported window;
    cuda::Pointer base = 0;
    size_t allocated = 0;
    cuda::check(cuda_.address_range(&base, &allocated, reinterpret_cast<cuda::Pointer>(at)), "cuMemGetAddressRange");
    const size_t offset = reinterpret_cast<cuda::Pointer>(at) - base;
    if (bytes > allocated || offset > allocated - bytes) return window;  // the range spans several allocations
    cuda::Handle handle = 0;
    if (cuda_.retain(&handle, at) != 0) return window;  // from cudaMalloc: no handle to export
    cuda::Properties properties{};
    int fd = -1;
    const bool can = cuda_.properties(&properties, handle) == 0 && (properties.handle_types & cuda::kPosixFd) != 0;
    if (can && cuda_.export_handle(&fd, handle, cuda::kPosixFd, 0) == 0) {
        window.fd = Descriptor(fd);
        window.offset = offset;
        window.bytes = allocated;
    }
    cuda_.release(handle);
    return window;
}

char* Gpu::map_window(int fd, size_t bytes) {
    cuda::Handle handle = 0;
    if (cuda_.import_handle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), cuda::kPosixFd) != 0) return nullptr;
    cuda::Pointer at = 0;
    bool mapped = false;
    if (cuda_.reserve(&at, bytes, 0, 0, 0) == 0) {
        const cuda::Access access{{cuda::kOnDevice, device_}, cuda::kReadWrite};
        if (cuda_.map(at, bytes, 0, handle, 0) == 0) {
            mapped = cuda_.set_access(at, bytes, &access, 1) == 0;
            if (!mapped) cuda_.unmap(at, bytes);
        }
        if (!mapped) cuda_.unreserve(at, bytes);
    }
    cuda_.release(handle);  // the mapping keeps the memory alive
    return mapped ? reinterpret_cast<char*>(at) : nullptr;
}

void Gpu::unmap_window(char* at, size_t bytes) {
    cuda_.unmap(reinterpret_cast<cuda::Pointer>(at), bytes);
    cuda_.unreserve(reinterpret_cast<cuda::Pointer>(at), bytes);
}

InContext::InContext(Gpu* gpu) : gpu_(gpu) {
    if (gpu_ == nullptr) return;
    const times::Driver timed;
    const cuda::Driver& cuda = gpu_->cuda_;
    void* now = nullptr;
    cuda::check(cuda.get_context(&now), "cuCtxGetCurrent");
    if (now != gpu_->context_) {
        cuda::check(cuda.push_context(gpu_->context_), "cuCtxPushCurrent");
        pushed_ = true;
    }
    cuda.exchange_capture_mode(&mode_);
}

InContext::~InContext() {
    if (gpu_ == nullptr) return;
    const times::Driver timed;
    gpu_->cuda_.exchange_capture_mode(&mode_);
    void* popped = nullptr;
    if (pushed_) gpu_->cuda_.pop_context(&popped);
}

}  // namespace moecomm::rma
