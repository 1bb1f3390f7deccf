// Gpu: streams, events, pinned memory, and windows that travel between processes as file descriptors.
// All in a context of its own. A thread that waits inside the driver (a copy to pageable memory, loading a kernel) keeps all other threads
// out of its context. In a shared context, a kernel that such a thread waits for would never get the bytes that the kernel waits for.
#pragma once
#include <memory>

#include "driver.h"
#include "runtime/descriptor.h"

namespace moecomm::rma {

using runtime::Descriptor;

class Gpu {
  public:
    // The GPU of the calling thread's current context, shared by all communicators; null without a context or a driver.
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
    // Needs no SM, but a kernel of another context may delay it like a plain copy (see copy).
    void write_word(void* to, uint64_t value, void* stream);

    void* pin(size_t bytes);
    void unpin(void* memory) { cuda_.unpin(memory); }

    // Export the allocation that contains [at, at + bytes); `fd` stays closed if the allocation cannot be exported.
    struct Exported {
        Descriptor fd;
        size_t offset = 0;  // of `at` in the allocation
        size_t bytes = 0;   // of the allocation
    };
    Exported export_window(void* at, size_t bytes);
    char* map_window(int fd, size_t bytes);  // null if this GPU cannot map it
    void unmap_window(char* at, size_t bytes);

  private:
    friend class InContext;
    void copy_in_two(void* to, const void* from, size_t half, void* stream);
    Gpu(const cuda::Driver& cuda, void* context, int device) : cuda_(cuda), context_(context), device_(device) {}

    const cuda::Driver& cuda_;
    void* context_;
    int device_;
};

// Makes the GPU's context current in the calling thread while it lives, and excludes the thread's calls from any stream capture.
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
