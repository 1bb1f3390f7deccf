// The cast of a row to e4m3 on its way, in shared memory: one scale for 128 columns.
#pragma once
#include "call.cuh"

namespace moecomm {

constexpr i32 kQuad = 4;                                   // lanes that share a group of 128 columns and its scale
constexpr i32 kEights = kQuantGroup / 8 / kQuad;           // times 8 columns that a lane has of it
constexpr i32 kStepColumns = kWarp / kQuad * kQuantGroup;  // of a warp at once

// Largest magnitudes as bits, two 16-bit columns a word, or one of 32 bits.  A NaN is the largest of all.
template <Type type>
MOECOMM_FN u32 larger(u32 a, u32 b) {
    if constexpr (type == Type::fp32) {
        return max(a, b);
    } else {
        u32 both;
        asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
        return both;
    }
}
template <Type type>
MOECOMM_FN u32 magnitudes(u32 word) {
    return word & (type == Type::fp32 ? 0x7fffffffu : 0x7fff7fffu);
}

// Of all columns of a group, as fp32.
template <Type type>
MOECOMM_FN float largest_in_group(u32 largest) {
    if constexpr (type != Type::fp32) largest = larger<type>(largest, largest >> 16);
    largest = larger<type>(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = larger<type>(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    if constexpr (type == Type::fp32) {
        return __uint_as_float(largest);
    } else {
        float both[2];
        widen_word<type>(largest, both);
        return both[0];
    }
}

template <Type type>
MOECOMM_FN uint2 narrow_eight(const uint4* words, float up) {
    constexpr i32 each = columns_in_16(type);
    float values[8];
#pragma unroll
    for (i32 i = 0; i < 8 / each; ++i) widen<type>(words[i], values + i * each);
    u32 pairs[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) pairs[i] = narrow_e4m3(__fmul_rn(values[2 * i], up), __fmul_rn(values[2 * i + 1], up));
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// A warp casts `columns` (a multiple of 8) at `piece` to e4m3 at `to`.  Of the scales, each of their bytes go to `scales`.
//
// Four lanes share a group: fewer shuffles and divisions a column than with more.  The eights of neighbouring groups are read in another
// order, so that lanes do not meet in a bank of shared memory.
template <Type type, ScaleFormat format>
MOECOMM_FN void quantize_piece(u8* to, const u8* piece, i32 columns, u8* scales) {
    constexpr i32 vectors = 8 / columns_in_16(type);
    const i32 quad = lane_id() / kQuad;
#pragma unroll 1
    for (i32 first = quad * kQuantGroup; first - quad * kQuantGroup < columns; first += kStepColumns) {
        const auto column = [&](i32 i) { return first + 8 * (lane_id() % kQuad + kQuad * ((i + quad) % kEights)); };
        uint4 words[kEights][vectors];
        u32 largest = 0;
#pragma unroll
        for (i32 i = 0; i < kEights; ++i) {
#pragma unroll
            for (i32 v = 0; v < vectors; ++v) {
                uint4& w = words[i][v];
                w = make_uint4(0, 0, 0, 0);
                if (column(i) < columns) w = reinterpret_cast<const uint4*>(piece + column(i) * bytes_of(type))[v];
                largest = larger<type>(largest, larger<type>(larger<type>(magnitudes<type>(w.x), magnitudes<type>(w.y)),
                                                             larger<type>(magnitudes<type>(w.z), magnitudes<type>(w.w))));
            }
        }
        const GroupScale group = group_scale<format>(largest_in_group<type>(largest));
#pragma unroll
        for (i32 i = 0; i < kEights; ++i)
            if (column(i) < columns) *reinterpret_cast<uint2*>(to + column(i)) = narrow_eight<type>(words[i], group.up);
        if (lane_id() % kQuad == 0 && first < columns) {
            if constexpr (format == ScaleFormat::fp32) reinterpret_cast<u32*>(scales)[first / kQuantGroup] = group.bits;
            if constexpr (format == ScaleFormat::ue8m0) scales[first / kQuantGroup] = static_cast<u8>(group.bits);
        }
    }
}

}  // namespace moecomm
