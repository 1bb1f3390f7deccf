// The GPU's clock: for the host (moecomm/observe/tracing/files.py), and for waits until a time.
#pragma once
#include "../protocol/deadline.h"

namespace moecomm {

// Called by one thread. Sleeps for up to twice as long. Orders nothing.
MOECOMM_FN void doze(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// Called by all threads of a launch of one block. Stores globaltimer to host memory; orders nothing.
MOECOMM_FN void store_time(u64 to) {
    if (threadIdx.x == 0) *reinterpret_cast<volatile u64*>(to) = now_ns();
}

}  // namespace moecomm
