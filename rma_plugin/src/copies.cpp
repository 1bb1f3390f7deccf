#include "copies.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "failure.h"

namespace moecomm::rma {

CopyStream::CopyStream(std::shared_ptr<Gpu> gpu) : gpu_(std::move(gpu)) {
    if (gpu_ == nullptr) return;
    stream_ = gpu_->create_stream();
    // Create all events that will ever be open at once: NCCL's thread must not create any, because that may block.
    for (size_t i = 0; i < kRoom; ++i) events_.push_back(gpu_->create_event());
}

CopyStream::~CopyStream() {
    if (gpu_ == nullptr) return;
    for (const Open& open : open_) gpu_->destroy_event(open.event);
    for (void* event : events_) gpu_->destroy_event(event);
    gpu_->destroy_stream(stream_);
}

Ticket CopyStream::copy(void* to, const void* from, size_t bytes, bool on_gpu) {
    if (bytes == 0) return issued_;
    if (on_gpu) {
        gpu_->copy(to, from, bytes, stream_);
        return issue();
    }
    std::memmove(to, from, bytes);
    return issued_;
}

Ticket CopyStream::write_word(void* to, uint64_t value) {
    gpu_->write_word(to, value, stream_);
    return issue();
}

Ticket CopyStream::issue() {
    if (events_.empty()) throw Failure(Fault::kCuda, "a copy that there is no room for");
    void* event = events_.back();
    gpu_->record(event, stream_);
    events_.pop_back();
    open_.push_back({++issued_, event});
    return issued_;
}

bool CopyStream::ended(Ticket ticket) {
    while (ended_ < ticket && !open_.empty() && gpu_->ended(open_.front().event)) {
        ended_ = open_.front().ticket;
        events_.push_back(open_.front().event);
        open_.pop_front();
    }
    return ended_ >= ticket;
}

Staging::Staging(std::shared_ptr<Gpu> gpu, size_t bytes) : gpu_(std::move(gpu)) {
    memory_ = static_cast<char*>(gpu_ != nullptr ? gpu_->pin(bytes) : std::calloc(1, bytes));
    if (memory_ == nullptr) throw std::bad_alloc();
}

Staging::~Staging() {
    if (gpu_ != nullptr) {
        gpu_->unpin(memory_);
    } else {
        std::free(memory_);
    }
}

}  // namespace moecomm::rma
