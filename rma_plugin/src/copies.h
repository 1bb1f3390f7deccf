// In-order asynchronous copies: on a stream of a GPU, or immediate if only host memory is involved.
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "gpu.h"

namespace moecomm::rma {

using Ticket = uint64_t;  // position of a copy in its stream; 0 has always ended

class CopyStream {
  public:
    static constexpr size_t kRoom = 64;  // far below the driver's queue depth, beyond which a launch blocks

    explicit CopyStream(std::shared_ptr<Gpu> gpu);
    ~CopyStream();
    CopyStream(const CopyStream&) = delete;
    CopyStream& operator=(const CopyStream&) = delete;

    bool room(size_t copies = 1) const { return open_.size() + copies <= kRoom; }  // the caller of a copy must check it first
    // `on_gpu`: at least one side is GPU memory. Host memory on the other side must be pinned and unchanged until the copy has ended.
    Ticket copy(void* to, const void* from, size_t bytes, bool on_gpu);
    Ticket write_word(void* to, uint64_t value);  // `to` is GPU memory
    Ticket last() const { return issued_; }       // ends when all copies so far have ended
    bool ended(Ticket ticket);
    bool idle() { return ended(issued_); }

  private:
    Ticket issue();

    std::shared_ptr<Gpu> gpu_;
    void* stream_ = nullptr;
    struct Open {
        Ticket ticket;
        void* event;
    };
    std::deque<Open> open_;
    std::vector<void*> events_;  // free
    Ticket issued_ = 0, ended_ = 0;
};

// Host memory for copies to and from a GPU; pinned if there is a GPU.
class Staging {
  public:
    Staging(std::shared_ptr<Gpu> gpu, size_t bytes);
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;
    char* get() const { return memory_; }

  private:
    std::shared_ptr<Gpu> gpu_;
    char* memory_;
};

}  // namespace moecomm::rma
