// Arguments of the kernels in calls.cuh and pace.cuh, for their launches as well.
#pragma once
#include "window.h"

namespace moecomm {

struct WindowCallArgs {
    Window window;
    u64 value;  // to add, to store, or to wait for
    i32 rank;   // whose signal; wait: the rank that raises it, or -1
    i32 index;  // of the signal
};

struct PauseArgs {
    u64 due;  // of a u64 in device memory: when the copies so far may have ended, by the GPU's clock
    u64 ns;   // that the last copy takes at the wanted rate
};

}  // namespace moecomm
