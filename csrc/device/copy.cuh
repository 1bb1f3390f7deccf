// Copies by a warp through registers: rows inside our own window, and the few bytes beside a row.
#pragma once
#include "config.cuh"

namespace moecomm {

// What peers or other blocks write during this launch is read past the first-level cache: a line there may have been filled before the
// flag was seen, on account of a neighbour in the same line.
MOECOMM_FN uint4 load_fresh(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
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

// One row to several places, `to(i)` for each bit i of `places`, the same in all lanes.  Several loads of a lane are in flight at once.
template <i32 bytes, class Place>
MOECOMM_FN void copy_row(const u8* from, u32 places, Place to) {
    constexpr i32 vectors = bytes / 16, per_lane = ceil_div(vectors, kWarp);
    constexpr i32 batches = ceil_div(per_lane, 8), depth = ceil_div(per_lane, batches);
#pragma unroll 1
    for (i32 batch = 0; batch < batches; ++batch) {
        const i32 first = batch * depth * kWarp + lane_id();
        uint4 held[depth];
#pragma unroll
        for (i32 i = 0; i < depth; ++i)
            if (first + i * kWarp < vectors) held[i] = load_fresh(reinterpret_cast<const uint4*>(from) + first + i * kWarp);
#pragma unroll 1
        for (u32 left = places; left != 0; left &= left - 1) {
            auto* place = reinterpret_cast<uint4*>(to(__ffs(left) - 1));
#pragma unroll
            for (i32 i = 0; i < depth; ++i)
                if (first + i * kWarp < vectors) place[first + i * kWarp] = held[i];
        }
    }
}

// A row of scales, or a part of it: any number of bytes, by words where both ends allow it.  Volatile: like load_fresh, from any memory.
MOECOMM_FN void copy_small(u8* to, const volatile u8* from, i32 bytes) {
    const bool words = (reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | static_cast<u64>(bytes)) % 4 == 0;
    if (words) {
        for (i32 i = lane_id(); i < bytes / 4; i += kWarp) reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const volatile u32*>(from)[i];
    } else {
        for (i32 i = lane_id(); i < bytes; i += kWarp) to[i] = from[i];
    }
}

}  // namespace moecomm
