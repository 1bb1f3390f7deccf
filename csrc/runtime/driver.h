// The CUDA driver, looked up when it is first needed: one build runs with and without it.
#pragma once
#include <string>

#include "../protocol/compiler.h"

namespace moecomm::runtime {

// Empty if a CUDA device can be used, else a sentence that names the first thing missing.  Initialises the driver.
std::string cuda_missing();

// The calling thread's current context; 0: none.
u64 cuda_context();

// Whether what is enqueued on this stream becomes part of a graph.
bool cuda_capturing(u64 stream);

struct Launch {
    u64 function;  // CUfunction
    u32 grid, block;
    u32 shared_bytes;
    u64 stream;    // CUstream; 0 is the legacy default stream
    bool overlap;  // may begin while the kernel before it on the stream ends; that kernel and this one say when (griddepcontrol)
    u32 cluster;   // blocks that run on neighbouring multiprocessors; divides the grid
};

// Launches a kernel whose only parameter is the struct at `args`, in the calling thread's current context.  A driver from
// before CUDA 11.8 does neither.
// These four throw std::runtime_error with the driver's name of the error.
void cuda_launch(const Launch& launch, const void* args);

}  // namespace moecomm::runtime
