// Sums over the lanes of a warp. All lanes call them together.
#pragma once
#include "copy.cuh"

namespace moecomm {

// The sum over all lanes, in every lane.
template <class T>
MOECOMM_FN T sum_of_warp(T value) {
#pragma unroll
    for (i32 lane = 1; lane < kWarp; lane *= 2) value += __shfl_xor_sync(kAllLanes, value, lane);
    return value;
}

// The sum over the lanes up to this one.
template <class T>
MOECOMM_FN T sum_up_to_lane(T value) {
#pragma unroll
    for (i32 distance = 1; distance < kWarp; distance *= 2) {
        const T below = __shfl_up_sync(kAllLanes, value, distance);
        if (lane_id() >= distance) value += below;
    }
    return value;
}

}  // namespace moecomm
