// Calls of a Window from Python, as kernels of one block on a stream. Each is launched with the threads of the barrier; only the barrier
// uses more than one.
#pragma once
#include "call_args.h"
#include "window.cuh"

namespace moecomm {

MOECOMM_FN void window_signal(const WindowCallArgs& a) {
    if (threadIdx.x == 0) a.window.signal(a.rank, a.index, a.value);
}
MOECOMM_FN void window_set_signal(const WindowCallArgs& a) {
    if (threadIdx.x == 0) a.window.set_signal(a.rank, a.index, a.value);
}
// After a failure the record says what happened; the kernel ends like any other.
MOECOMM_FN void window_wait(const WindowCallArgs& a) {
    if (threadIdx.x == 0) a.window.wait(CoopThread{}, a.index, a.value, a.rank);
}
MOECOMM_FN void window_barrier(const WindowCallArgs& a) { a.window.barrier(CoopBlock{}, kHostBarrier); }

}  // namespace moecomm
