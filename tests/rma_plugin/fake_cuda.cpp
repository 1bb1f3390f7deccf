// A CUDA driver for machines without one: what the plugin uses of it, over host memory.  Windows are memfds, so they travel between
// processes; copies end late, each stream in its order; what a real driver would refuse, or block on, is an error here.  Calls that may
// wait for a kernel, as kernels wait for NCCL's threads, wait for those: where one of them can't go on meanwhile, that is an error, too.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "driver.h"
#include "fake_cuda.h"

using namespace moecomm::rma::cuda;

namespace {

constexpr int kOk = 0, kInvalid = 1, kNoContext = 201;

struct Allocation {
    int fd;
    size_t bytes;
    bool shared;  // it can be exported
    int references;
};
struct Range {
    size_t bytes;
    Allocation* allocation;  // null: pinned, or reserved
    bool usable;
};
struct Event {
    bool recorded = false, ended = true;
};
struct Op {
    enum { kCopy, kWord, kEvent } kind;
    char *to, *from;
    size_t bytes;
    uint64_t value;
    Event* event;
};
struct Stream {
    void* context;
    std::deque<Op> ops;
};

std::mutex mutex;
std::map<Pointer, Range> ranges;
std::set<Stream*> streams;
std::set<void*> made_contexts;
bool held = false;  // no stream goes on
std::mutex nccl_mutex;
std::map<std::thread::id, uint64_t> nccl_threads;  // with a count of their calls
thread_local bool is_nccl_thread = false;
thread_local std::vector<void*> contexts;
thread_local int capture_mode;
uint64_t random_state = 88172645463325252ull;

uint64_t next_random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

const Range* range_at(Pointer at, size_t bytes) {
    auto found = ranges.upper_bound(at);
    if (found == ranges.begin()) return nullptr;
    --found;
    return found->second.usable && at + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

void* current() { return contexts.empty() ? nullptr : contexts.back(); }

// Work may be given to it now.  In a context that others use, this could wait for as long as they do.
bool takes_work(const Stream* stream) { return stream->context == current() && made_contexts.count(current()) == 1; }

int copy(Pointer to, Pointer from, size_t bytes, Stream* stream) {
    if (!takes_work(stream)) return kInvalid;
    if (capture_mode != kRelaxed) return kInvalid;                                            // it would end a capture elsewhere
    if (range_at(to, bytes) == nullptr || range_at(from, bytes) == nullptr) return kInvalid;  // pageable: it would block
    if (stream->ops.size() > 512) return kInvalid;                                            // so would this
    stream->ops.push_back({Op::kCopy, reinterpret_cast<char*>(to), reinterpret_cast<char*>(from), bytes, 0, nullptr});
    return kOk;
}

[[noreturn]] void never_meant(const char* function, const char* why) {
    std::fprintf(stderr, "%s %s\n", function, why);
    std::abort();
}

void may_wait(const char* function) {
    if (is_nccl_thread) never_meant(function, "is called on NCCL's thread, and may wait");
}

// Nothing is locked here: as long as this takes, whatever NCCL's threads call must not be held up.
void waits(const char* function) {
    may_wait(function);
    std::unique_lock<std::mutex> lock(nccl_mutex);
    const auto before = nccl_threads;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    for (const auto& [id, calls] : before) {
        for (;;) {
            const auto found = nccl_threads.find(id);
            if (found == nccl_threads.end() || found->second != calls) break;
            if (std::chrono::steady_clock::now() > deadline) never_meant(function, "waits, and NCCL's thread with it");
            lock.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(20));
            lock.lock();
        }
    }
}

// As a GPU does, unseen by ThreadSanitizer: signals order its writes, and those are copies as well.  Words are never seen by halves.
void copy_bytes(char* to, const char* from, size_t bytes) {
    const bool words = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % sizeof(uint64_t) == 0;
    const size_t step = words ? sizeof(uint64_t) : 1;
    for (size_t i = 0; i < bytes; i += step) {
        if (words) {
            __atomic_store_n(reinterpret_cast<uint64_t*>(to + i), *reinterpret_cast<const uint64_t*>(from + i), __ATOMIC_RELEASE);
        } else {
            to[i] = from[i];
        }
    }
}

void run(Op& op) {
    if (op.kind == Op::kCopy) copy_bytes(op.to, op.from, op.bytes);
    if (op.kind == Op::kWord) __atomic_store_n(reinterpret_cast<uint64_t*>(op.to), op.value, __ATOMIC_RELEASE);
    if (op.kind == Op::kEvent) op.event->ended = true;
}

// Streams go on by themselves, each for a few steps at a time, or for none.
void engine() {
    for (;;) {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            for (Stream* stream : streams) {
                if (held) break;
                for (uint64_t steps = next_random() % 8; steps > 0 && !stream->ops.empty(); --steps) {
                    run(stream->ops.front());
                    stream->ops.pop_front();
                }
            }
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

}  // namespace

extern "C" {
void fake_context(bool there) {
    static int context;
    contexts.clear();
    if (there) contexts.push_back(&context);
}
void fake_nccl_thread(bool begins) {
    const std::lock_guard<std::mutex> lock(nccl_mutex);
    is_nccl_thread = begins;
    if (begins) nccl_threads[std::this_thread::get_id()] = 0;
    if (!begins) nccl_threads.erase(std::this_thread::get_id());
}
void fake_hold_copies(bool hold) {
    const std::lock_guard<std::mutex> lock(mutex);
    held = hold;
}
int fake_open_copies() {
    const std::lock_guard<std::mutex> lock(mutex);
    int open = 0;
    for (const Stream* stream : streams) {
        for (const Op& op : stream->ops) open += op.kind == Op::kEvent ? 1 : 0;
    }
    return open;
}
int fake_mapped_windows() {
    const std::lock_guard<std::mutex> lock(mutex);
    int mapped = 0;
    for (const auto& [at, range] : ranges) mapped += range.allocation != nullptr ? 1 : 0;
    return mapped;
}

int cuGetErrorName(int result, const char** name) {
    *name = result == kNoContext ? "CUDA_ERROR_INVALID_CONTEXT" : result == kInvalid ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_UNKNOWN";
    return kOk;
}
int cuCtxGetCurrent(void** to) {
    if (is_nccl_thread) {
        const std::lock_guard<std::mutex> lock(nccl_mutex);
        ++nccl_threads[std::this_thread::get_id()];
    }
    return *to = current(), kOk;
}
int cuCtxPushCurrent_v2(void* to) { return contexts.push_back(to), kOk; }
int cuCtxPopCurrent_v2(void** to) {
    if (contexts.empty()) return kNoContext;
    *to = contexts.back();
    contexts.pop_back();
    return kOk;
}
int cuCtxCreate_v2(void** to, unsigned, int) {
    may_wait("cuCtxCreate");
    const std::lock_guard<std::mutex> lock(mutex);
    contexts.push_back(*to = new int);
    made_contexts.insert(*to);
    return kOk;
}
int cuCtxDestroy_v2(void* gone) {
    may_wait("cuCtxDestroy");
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Stream* stream : streams) {
        if (stream->context == gone) std::abort();  // allowed, and never meant
    }
    if (current() == gone || made_contexts.erase(gone) != 1) std::abort();
    delete static_cast<int*>(gone);
    return kOk;
}
int cuCtxGetDevice(int* device) { return *device = 0, current() == nullptr ? kNoContext : kOk; }
int cuThreadExchangeStreamCaptureMode(int* mode) {
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return kOk;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, kOk; }
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
    may_wait("cuStreamCreateWithPriority");
    if (current() == nullptr) return kNoContext;
    const std::lock_guard<std::mutex> lock(mutex);
    static const bool running = (std::thread(engine).detach(), true);
    auto* made = new Stream{current(), {}};
    streams.insert(made);
    *stream = made;
    return running ? kOk : kInvalid;
}
int cuStreamDestroy_v2(void* stream) {
    may_wait("cuStreamDestroy");
    const std::lock_guard<std::mutex> lock(mutex);
    if (!static_cast<Stream*>(stream)->ops.empty()) std::abort();  // allowed, and never meant
    streams.erase(static_cast<Stream*>(stream));
    delete static_cast<Stream*>(stream);
    return kOk;
}
int cuEventCreate(void** event, unsigned) {
    may_wait("cuEventCreate");
    return *event = new Event, kOk;
}
int cuEventDestroy_v2(void* event) {
    may_wait("cuEventDestroy");
    const std::lock_guard<std::mutex> lock(mutex);
    delete static_cast<Event*>(event);
    return kOk;
}
int cuEventRecord(void* event, void* stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto* e = static_cast<Event*>(event);
    if (!takes_work(static_cast<Stream*>(stream))) return kInvalid;
    e->ended = false;
    static_cast<Stream*>(stream)->ops.push_back({Op::kEvent, nullptr, nullptr, 0, 0, e});
    return kOk;
}
int cuEventQuery(void* event) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (current() == nullptr) return kNoContext;
    return static_cast<Event*>(event)->ended ? kOk : kNotReady;
}
int cuMemcpyAsync(Pointer to, Pointer from, size_t bytes, void* stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    const Range *target = range_at(to, bytes), *source = range_at(from, bytes);
    if (target != nullptr && source != nullptr && target->allocation != nullptr && source->allocation == nullptr && bytes > 1 &&
        bytes < 32768) {
        never_meant("cuMemcpyAsync", "brings few bytes: they would wait for the end of a kernel's turn");
    }
    return copy(to, from, bytes, static_cast<Stream*>(stream));
}
int cuMemcpy2DAsync_v2(const Rows* rows, void* stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    const Side &from = rows->from, &to = rows->to;
    if (from.x + from.y + to.x + to.y != 0 || from.type != 4 || to.type != 4) return kInvalid;
    if (from.pitch < rows->bytes || to.pitch < rows->bytes || rows->rows < 2) return kInvalid;
    for (size_t row = 0; row < rows->rows; ++row) {
        const int result = copy(to.at + row * to.pitch, from.at + row * from.pitch, rows->bytes, static_cast<Stream*>(stream));
        if (result != kOk) return result;
    }
    return kOk;
}
int cuStreamWriteValue64_v2(void* stream, Pointer to, uint64_t value, unsigned) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!takes_work(static_cast<Stream*>(stream)) || range_at(to, 8) == nullptr || to % 8 != 0) return kInvalid;
    static_cast<Stream*>(stream)->ops.push_back({Op::kWord, reinterpret_cast<char*>(to), nullptr, 0, value, nullptr});
    return kOk;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
    waits("cuMemHostAlloc");
    const std::lock_guard<std::mutex> lock(mutex);
    *memory = std::calloc(1, bytes);
    ranges[reinterpret_cast<Pointer>(*memory)] = {bytes, nullptr, true};
    return kOk;
}
int cuMemFreeHost(void* memory) {
    waits("cuMemFreeHost");
    const std::lock_guard<std::mutex> lock(mutex);
    ranges.erase(reinterpret_cast<Pointer>(memory));
    std::free(memory);
    return kOk;
}
int cuMemGetAddressRange_v2(Pointer* base, size_t* bytes, Pointer at) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = ranges.upper_bound(at);
    if (found == ranges.begin()) return kInvalid;
    --found;
    *base = found->first;
    *bytes = found->second.bytes;
    return kOk;
}
int cuMemRetainAllocationHandle(Handle* handle, void* at) {
    const std::lock_guard<std::mutex> lock(mutex);
    const Range* range = range_at(reinterpret_cast<Pointer>(at), 1);
    if (range == nullptr || range->allocation == nullptr) return kInvalid;
    ++range->allocation->references;
    *handle = reinterpret_cast<Handle>(range->allocation);
    return kOk;
}
int cuMemGetAllocationPropertiesFromHandle(Properties* properties, Handle handle) {
    properties->handle_types = reinterpret_cast<Allocation*>(handle)->shared ? kPosixFd : 0;
    return kOk;
}
int cuMemExportToShareableHandle(void* fd, Handle handle, int type, unsigned long long) {
    may_wait("cuMemExportToShareableHandle");
    const auto* allocation = reinterpret_cast<Allocation*>(handle);
    if (!allocation->shared || type != kPosixFd) return kInvalid;
    *static_cast<int*>(fd) = ::fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
    return kOk;
}
int cuMemImportFromShareableHandle(Handle* handle, void* fd, int) {
    may_wait("cuMemImportFromShareableHandle");
    const int copy = ::fcntl(static_cast<int>(reinterpret_cast<intptr_t>(fd)), F_DUPFD_CLOEXEC, 0);
    struct stat status{};
    if (copy < 0 || ::fstat(copy, &status) != 0 || status.st_size == 0) return kInvalid;
    *handle = reinterpret_cast<Handle>(new Allocation{copy, static_cast<size_t>(status.st_size), true, 1});
    return kOk;
}
int cuMemAddressReserve(Pointer* at, size_t bytes, size_t, Pointer, unsigned long long) {
    may_wait("cuMemAddressReserve");
    void* reserved = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at = reinterpret_cast<Pointer>(reserved);
    return reserved == MAP_FAILED ? kInvalid : kOk;
}
int cuMemAddressFree(Pointer at, size_t bytes) {
    waits("cuMemAddressFree");
    return ::munmap(reinterpret_cast<void*>(at), bytes) == 0 ? kOk : kInvalid;
}
int cuMemMap(Pointer at, size_t bytes, size_t, Handle handle, unsigned long long) {
    waits("cuMemMap");
    const std::lock_guard<std::mutex> lock(mutex);
    auto* allocation = reinterpret_cast<Allocation*>(handle);
    if (bytes > allocation->bytes) return kInvalid;
    void* got = ::mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, allocation->fd, 0);
    if (got == MAP_FAILED) return kInvalid;
    ++allocation->references;
    ranges[at] = {bytes, allocation, false};
    return kOk;
}
int cuMemSetAccess(Pointer at, size_t, const Access*, size_t) {
    waits("cuMemSetAccess");
    const std::lock_guard<std::mutex> lock(mutex);
    ranges[at].usable = true;
    return kOk;
}
static void release(Allocation* allocation) {
    if (--allocation->references > 0) return;
    ::close(allocation->fd);
    delete allocation;
}
int cuMemUnmap(Pointer at, size_t) {
    waits("cuMemUnmap");
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = ranges.find(at);
    if (found == ranges.end()) return kInvalid;
    release(found->second.allocation);
    ranges.erase(found);
    return kOk;
}
int cuMemRelease(Handle handle) {
    may_wait("cuMemRelease");
    const std::lock_guard<std::mutex> lock(mutex);
    release(reinterpret_cast<Allocation*>(handle));
    return kOk;
}
char* fake_allocate(size_t bytes, bool shared) {
    const size_t whole = (bytes + 4095) / 4096 * 4096;
    const int fd = ::memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(whole)) != 0) std::abort();
    Pointer at = 0;
    const auto handle = reinterpret_cast<Handle>(new Allocation{fd, whole, shared, 1});
    if (cuMemAddressReserve(&at, whole, 0, 0, 0) != kOk || cuMemMap(at, whole, 0, handle, 0) != kOk) std::abort();
    cuMemSetAccess(at, whole, nullptr, 1);
    cuMemRelease(handle);
    return reinterpret_cast<char*>(at);
}
}
