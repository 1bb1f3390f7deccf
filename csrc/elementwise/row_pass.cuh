// Kernels by themselves that pass over rows once, by any number of blocks (moecomm/kernels/row_pass.py).
#pragma once
#include "../device/copy.cuh"
#include "pass_threads.h"

namespace moecomm {

constexpr i32 kPassWarps = kPassThreads / kWarp;

MOECOMM_FN i32 first_of_warp() { return blockIdx.x * kPassWarps + warp_id(); }
MOECOMM_FN i32 all_warps() { return gridDim.x * kPassWarps; }

// A row a warp.
template <class Body>
MOECOMM_FN void each_row(i32 count, const Body& body) {
    for (i32 row = first_of_warp(); row < count; row += all_warps()) body(row);
}

}  // namespace moecomm
