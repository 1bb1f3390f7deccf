// Helpers of stand-alone kernels that pass over rows once, with any number of blocks (moecomm/gpu/row_pass.py). These kernels order
// nothing and cannot fail.
#pragma once
#include "../device/lanes.cuh"
#include "args.h"

namespace moecomm {

constexpr i32 kPassWarps = kPassThreads / kWarp;

MOECOMM_FN i32 first_of_warp() { return blockIdx.x * kPassWarps + warp_id(); }
MOECOMM_FN i32 all_warps() { return gridDim.x * kPassWarps; }

// Call body(row) for each row, by all lanes of one warp. Called by all threads of the grid.
template <class Body>
MOECOMM_FN void each_row(i32 count, const Body& body) {
    for (i32 row = first_of_warp(); row < count; row += all_warps()) body(row);
}

}  // namespace moecomm
