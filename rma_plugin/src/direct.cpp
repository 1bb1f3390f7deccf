#include "direct.h"

#include <algorithm>
#include <cstring>

namespace moecomm::rma {
namespace {

constexpr size_t kBounceBytes = 256 * 1024;
constexpr uint64_t kHostBytesATurn = 1024 * 1024;  // per call, of a copy that this thread does itself

}  // namespace

DirectPath::DirectPath(std::shared_ptr<Gpu> gpu, bool to_ourselves)
    : stream_(gpu),
      inline_(gpu, CopyStream::kRoom * kInlineBytes),
      bounce_(gpu, to_ourselves ? kBounceBytes : 1),
      to_ourselves_(to_ourselves) {}

void DirectPath::push(Request& request) {
    ++request.held;
    waiting_.push_back(&request);
    progress();
}

void DirectPath::progress() {
    stream_.idle();
    while (!copying_.empty() && stream_.ended(copying_.front()->ticket)) {
        copying_.front()->has_moved();
        --copying_.front()->held;
        copying_.pop_front();
    }
    while (!waiting_.empty() && stream_.room()) {
        Request& next = *waiting_.front();
        if (!start(next)) return;
        next.ticket = stream_.last();
        copying_.push_back(&next);
        waiting_.pop_front();
    }
}

bool DirectPath::start(Request& request) {
    if (request.bytes == 0) return true;
    if (!request.local->registered || !request.remote->registered) {
        throw Failure(Fault::kBadHandle, "memory was given back while a copy of it was under way");
    }
    char* remote = reach(*request.remote, request.remote_at, request.peer);
    char* local = request.local->base + request.local_at;
    char* to = request.kind == Request::Kind::kPut ? remote : local;
    char* from = request.kind == Request::Kind::kPut ? local : remote;
    const bool local_gpu = request.local->on_gpu, remote_gpu = request.remote->on_gpu;
    if (!local_gpu && !remote_gpu) {
        const uint64_t now = std::min(request.bytes - request.started, kHostBytesATurn);
        stream_.copy(to + request.started, from + request.started, now, false);
        request.started += now;
        return request.started == request.bytes;
    }
    if (!local_gpu && request.kind == Request::Kind::kPut && request.bytes <= kInlineBytes) {
        char* slot = inline_.get() + (stream_.last() + 1) % CopyStream::kRoom * kInlineBytes;
        std::memcpy(slot, from, request.bytes);
        stream_.copy(to, slot, request.bytes, true);
        return true;
    }
    if (!to_ourselves_ || !local_gpu || !remote_gpu) {
        stream_.copy(to, from, request.bytes, true);
        return true;
    }
    // Within one GPU, a copy may be a kernel, which could wait for SMs behind the kernel that waits for it. A bounce through host memory
    // avoids that.
    while (request.started < request.bytes) {
        stream_.idle();
        if (!stream_.room(2)) return false;
        const uint64_t now = std::min<uint64_t>(request.bytes - request.started, kBounceBytes);
        stream_.copy(bounce_.get(), from + request.started, now, true);
        stream_.copy(to + request.started, bounce_.get(), now, true);
        request.started += now;
    }
    return true;
}

}  // namespace moecomm::rma
