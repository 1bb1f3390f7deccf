// The CUDA driver, looked up when it is first needed: one build runs with and without it.
#pragma once
#include <string>

#include "../protocol/compiler.h"

namespace moecomm::runtime {

// Empty if a CUDA device can be used, else a sentence that names the first thing missing.  Initialises the driver.
std::string cuda_missing();

struct Launch {
    u64 function;  // CUfunction
    u32 grid, block;
    u32 shared_bytes;
    u64 stream;  // CUstream; 0 is the legacy default stream
};

// cuLaunchKernel of a kernel whose only parameter is the struct at `args`, in the calling thread's current context.
// Throws std::runtime_error with the driver's name of the error.
void cuda_launch(const Launch& launch, const void* args);

}  // namespace moecomm::runtime
