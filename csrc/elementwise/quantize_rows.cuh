// Cast of rows to e4m3 or int8 with a scale for each row: the arithmetic of quantize_rows in moecomm/fused/quantized.py.
#pragma once
#include "../device/cast.cuh"
#include "row_pass.cuh"

namespace moecomm {

constexpr i32 kCastColumns = 8;  // columns that a lane casts at once

// Returns value / scale in e4m3, of two columns.  The cast saturates.
MOECOMM_FN u32 scaled_e4m3(float first, float second, float scale) {
    return narrow_e4m3(__fdiv_rn(first, scale), __fdiv_rn(second, scale));
}
// Returns value * up, rounded to the nearest even integer, as a byte; 0 for NaN.
MOECOMM_FN u32 scaled_int8(float value, float up) {
    const float near = rintf(__fmul_rn(value, up)), clamped = near > 127.0f ? 127.0f : near < -127.0f ? -127.0f : near;
    return near != near ? 0 : static_cast<u32>(static_cast<i32>(clamped)) & 0xffu;
}

// Called by all threads of the grid; one warp a row.  A row is read twice, the second time mostly from caches.
template <Type type, bool int8>
MOECOMM_FN void quantize_rows(const QuantizeRowsArgs& a) {
    constexpr i32 vectors = kCastColumns / columns_in_16(type), each = columns_in_16(type);
    each_row(a.count, [&](i32 row) {
        const u64 from = a.rows + static_cast<u64>(row) * a.columns * bytes_of(type);
        const auto load = [&](i32 column, uint4(&words)[vectors]) {
#pragma unroll
            for (i32 v = 0; v < vectors; ++v)
                words[v] = reinterpret_cast<const uint4*>(from + static_cast<u64>(column) * bytes_of(type))[v];
        };
        u32 seen = 0;
#pragma unroll 4
        for (i32 column = lane_id() * kCastColumns; column < a.columns; column += kWarp * kCastColumns) {
            uint4 words[vectors];
            load(column, words);
#pragma unroll
            for (i32 v = 0; v < vectors; ++v) seen = larger<type>(seen, largest_magnitudes<type>(words[v]));
        }
        const float amax = largest_in_group<type, kWarp>(seen);
        constexpr float least = 1.0f / (448.0f * 512.0f);
        float scale = __fdiv_rn(amax, int8 ? 127.0f : 448.0f);
        if (!int8 && scale < least) scale = least;
        const float up = amax == 0.0f ? 0.0f : __fdiv_rn(127.0f, amax);
#pragma unroll 2
        for (i32 column = lane_id() * kCastColumns; column < a.columns; column += kWarp * kCastColumns) {
            uint4 words[vectors];
            float values[kCastColumns];
            load(column, words);
#pragma unroll
            for (i32 v = 0; v < vectors; ++v) widen<type>(words[v], values + v * each);
            u32 made[2] = {};
#pragma unroll
            for (i32 i = 0; i < kCastColumns; i += 2) {
                const u32 pair =
                    int8 ? scaled_int8(values[i], up) | scaled_int8(values[i + 1], up) << 8 : scaled_e4m3(values[i], values[i + 1], scale);
                made[i / 4] |= pair << (i % 4 * 8);
            }
            *reinterpret_cast<uint2*>(a.to + static_cast<u64>(row) * a.columns + column) = make_uint2(made[0], made[1]);
        }
        if (lane_id() == 0) reinterpret_cast<float*>(a.scales)[row] = scale;
    });
}

}  // namespace moecomm
