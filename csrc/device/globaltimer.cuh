// The GPU's clock, for the host: see moecomm/observe/tracing/device.py.
#pragma once
#include "../protocol/deadline.h"

namespace moecomm {

// Called by all threads of a launch of one block. Stores globaltimer to host memory; orders nothing.
MOECOMM_FN void store_time(u64 to) {
    if (threadIdx.x == 0) *reinterpret_cast<volatile u64*>(to) = now_ns();
}

}  // namespace moecomm
