// The CUDA driver, loaded with dlopen on first use, so that one build runs with and without it.
#pragma once
#include <string>

#include "../protocol/compiler.h"

namespace moecomm::runtime {

// Initialize the driver.  Return an empty string if a CUDA device is usable, else a sentence that names the first thing missing.
std::string cuda_missing();

// The calling thread's current context; 0: none.
u64 cuda_context();

// True if the stream is being captured into a graph.
bool cuda_capturing(u64 stream);

struct Launch {
    u64 function;  // CUfunction
    u32 grid, block;
    u32 shared_bytes;
    u64 stream;    // CUstream; 0 is the legacy default stream
    bool overlap;  // programmatic dependent launch: may begin before the previous kernel ends; both kernels use griddepcontrol
    u32 cluster;   // blocks per thread block cluster; divides the grid
};

// Launch a kernel whose only parameter is the struct at `args`, in the calling thread's current context.  Drivers before CUDA 11.8 support
// neither `overlap` nor `cluster`.  Throws std::runtime_error with the driver's name of the error.
void cuda_launch(const Launch& launch, const void* args);

}  // namespace moecomm::runtime
