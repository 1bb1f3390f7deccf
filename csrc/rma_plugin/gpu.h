// One GPU: streams, events, pinned memory, and windows that travel between processes as file descriptors.
// In a context of our own.  Who waits inside the driver, in a copy to pageable memory or to load a kernel, keeps all other threads out of
// the context he waits in: were it ours, a kernel that he waits for would never get the bytes that it waits for.
#pragma once
#include <memory>

#include "../runtime/descriptor.h"
#include "driver.h"

namespace moecomm::rma {

using runtime::Descriptor;

class Gpu {
  public:
    // That of the calling thread's current context, the same for all communicators; null without one, or without a driver.
    static std::shared_ptr<Gpu> current();
    ~Gpu() { cuda_.destroy_context(context_); }
    Gpu(const Gpu&) = delete;
    Gpu& operator=(const Gpu&) = delete;

    void* create_stream();
    void destroy_stream(void* stream) { cuda_.destroy_stream(stream); }
    void* create_event();
    void destroy_event(void* event) { cuda_.destroy_event(event); }
    void record(void* event, void* stream);
    bool ended(void* event);
    void copy(void* to, const void* from, size_t bytes, void* stream);
    void upload(void* to, const void* from, size_t bytes, void* stream);  // from pinned memory to that of a GPU
    // By the stream itself: no multiprocessor is needed, so a kernel that waits for this word can't hold it up.
    void write_word(void* to, uint64_t value, void* stream);

    void* pin(size_t bytes);
    void unpin(void* memory) { cuda_.unpin(memory); }

    // The allocation that [at, at + bytes) lies in, if it can be given to another process: else the descriptor is closed.
    struct Exported {
        Descriptor fd;
        size_t offset = 0;  // of `at` in the allocation
        size_t bytes = 0;   // of the allocation
    };
    Exported export_window(void* at, size_t bytes);
    char* map_window(int fd, size_t bytes);  // null if this GPU can't reach it
    void unmap_window(char* at, size_t bytes);

  private:
    friend class InContext;
    void copy_in_two(void* to, const void* from, size_t half, void* stream);
    Gpu(const cuda::Driver& cuda, void* context, int device) : cuda_(cuda), context_(context), device_(device) {}

    const cuda::Driver& cuda_;
    void* context_;
    int device_;
};

// The GPU's context is the calling thread's while this lives, and what it does is no part of a graph that somebody captures.
class InContext {
  public:
    explicit InContext(Gpu* gpu);
    ~InContext();
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;

  private:
    Gpu* gpu_;
    bool pushed_ = false;
    int mode_ = cuda::kRelaxed;
};

}  // namespace moecomm::rma
