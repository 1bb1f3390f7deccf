// The cast of a row to e4m3 on its way: one scale for 128 columns, in place in shared memory.
#pragma once
#include "call.cuh"

namespace moecomm {

constexpr i32 kLaneColumns = 8;  // of one lane at a time; 16 lanes share a scale
constexpr i32 kGroupLanes = kQuantGroup / kLaneColumns;
constexpr i32 kWarpColumns = kWarp * kLaneColumns;
constexpr i32 kQuantSteps = 4;  // of kWarpColumns, read before the first is written

// The largest magnitude, as bits, among the 16 lanes of a group.  A NaN is the largest of all.
MOECOMM_FN u32 largest_in_group(const float (&values)[kLaneColumns]) {
    u32 largest = 0;
#pragma unroll
    for (i32 i = 0; i < kLaneColumns; ++i) largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
#pragma unroll
    for (i32 distance = kGroupLanes / 2; distance > 0; distance /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    return largest;
}

MOECOMM_FN uint2 narrow_columns(const float (&values)[kLaneColumns], float up) {
    u32 pairs[kLaneColumns / 2];
#pragma unroll
    for (i32 i = 0; i < kLaneColumns / 2; ++i) pairs[i] = narrow_e4m3(__fmul_rn(values[2 * i], up), __fmul_rn(values[2 * i + 1], up));
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// A warp casts `columns` (a multiple of 8) at `piece`, and leaves e4m3 in their place, from the front.  What a step writes has been
// read in that step or before it, because a column becomes smaller.
template <Type type>
MOECOMM_FN void quantize_piece(u8* piece, i32 columns, float* scales) {
    for (i32 first = 0; first < columns; first += kQuantSteps * kWarpColumns) {
        float values[kQuantSteps][kLaneColumns];
#pragma unroll
        for (i32 i = 0; i < kQuantSteps; ++i) {
            const i32 column = first + i * kWarpColumns + lane_id() * kLaneColumns;
#pragma unroll
            for (i32 v = 0; v < kLaneColumns; ++v) values[i][v] = 0.0f;
            const auto* held = reinterpret_cast<const uint4*>(piece + column * bytes_of(type));
#pragma unroll
            for (i32 v = 0; v < kLaneColumns && column < columns; v += columns_in_16(type))
                widen<type>(held[v / columns_in_16(type)], values[i] + v);
        }
        __syncwarp();
#pragma unroll
        for (i32 i = 0; i < kQuantSteps; ++i) {
            const i32 column = first + i * kWarpColumns + lane_id() * kLaneColumns;
            const GroupScale group = group_scale(largest_in_group(values[i]));
            if (column >= columns) continue;
            *reinterpret_cast<uint2*>(piece + column) = narrow_columns(values[i], group.up);
            if (column % kQuantGroup == 0) scales[column / kQuantGroup] = group.scale;
        }
        __syncwarp();
    }
}

}  // namespace moecomm
