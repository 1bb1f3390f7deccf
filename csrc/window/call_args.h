// Arguments of the kernels in calls.cuh, for their launches as well.
#pragma once
#include "window.h"

namespace moecomm {

struct WindowCallArgs {
    Window window;
    u64 value;  // to add, to store, or to wait for
    i32 rank;   // whose signal; wait: the rank that raises it, or -1
    i32 index;  // of the signal
};

}  // namespace moecomm
