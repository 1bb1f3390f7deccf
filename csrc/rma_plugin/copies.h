// Copies in order, without waiting for them: on a stream of a GPU, or at once where only host memory is concerned.
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "gpu.h"

namespace moecomm::rma {

using Ticket = uint64_t;  // the place of a copy in its stream; 0 has always ended

class CopyStream {
  public:
    static constexpr size_t kRoom = 64;  // far below what a driver queues before a launch has to wait

    explicit CopyStream(std::shared_ptr<Gpu> gpu);
    ~CopyStream();
    CopyStream(const CopyStream&) = delete;
    CopyStream& operator=(const CopyStream&) = delete;

    bool room(size_t copies = 1) const { return open_.size() + copies <= kRoom; }  // who copies has asked
    // `on_gpu`: either side is memory of a GPU.  Host memory that a GPU copies from or to is pinned, and stays as it is until the copy
    // ended.
    Ticket copy(void* to, const void* from, size_t bytes, bool on_gpu);
    Ticket upload(void* to, const void* from, size_t bytes, bool on_gpu);  // `from` is host memory
    Ticket write_word(void* to, uint64_t value);                           // to memory of the GPU
    Ticket last() const { return issued_; }                                // ends when all copies so far have
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
    std::vector<void*> events_;  // at hand
    Ticket issued_ = 0, ended_ = 0;
};

// Host memory that copies to and from a GPU go through: pinned where there is one.
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
