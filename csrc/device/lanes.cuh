// Lanes and warps: their ids, sums over the lanes of a warp, and copies of small data by a warp through registers.
#pragma once
#include "config.cuh"

namespace moecomm {

// Load data that peers or other blocks write during this launch. Called by one thread; relaxed, so the caller has acquired a flag before.
// Bypasses L1: a line there may have been filled before the flag was seen, because of a neighbor in the same line.
MOECOMM_FN i32 load_fresh(const i32* from) {
    i32 v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

MOECOMM_FN u32 lanes_below() {
    u32 mask;
    asm("mov.u32 %0, %lanemask_lt;" : "=r"(mask));
    return mask;
}
MOECOMM_FN i32 lane_id() { return threadIdx.x % kWarp; }
MOECOMM_FN i32 warp_id() { return threadIdx.x / kWarp; }

// Returns lane 0's value, in every lane. A whole warp. The compiler then knows that the lanes agree: it computes with the value in uniform
// registers, and takes the warp to be together after a branch on it.
MOECOMM_FN u32 uniform(u32 value) { return __shfl_sync(kAllLanes, value, 0); }

// Copy a row of scales, or a part of it: any number of bytes, by words if both ends are aligned. Called by all lanes of a warp; orders
// nothing and cannot fail. Volatile, so that, like load_fresh, it bypasses L1; the source may be any memory.
MOECOMM_FN void copy_small(u8* to, const volatile u8* from, i32 bytes) {
    const bool words = (reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | static_cast<u64>(bytes)) % 4 == 0;
    if (words) {
        for (i32 i = lane_id(); i < bytes / 4; i += kWarp) reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const volatile u32*>(from)[i];
    } else {
        for (i32 i = lane_id(); i < bytes; i += kWarp) to[i] = from[i];
    }
}

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
