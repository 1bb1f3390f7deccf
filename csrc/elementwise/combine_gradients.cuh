// Gradients of a weighted combine, in one pass over the rows: those of y and those of the weights.
#pragma once
#include "../device/cast.cuh"
#include "../device/lanes.cuh"
#include "args.h"
#include "row_pass.cuh"

namespace moecomm {

// Called by all threads of the grid; one warp a row.
template <Type type>
MOECOMM_FN void combine_gradients(const GradientArgs& a) {
    constexpr i32 columns = columns_in_16(type);
    each_row(a.count, [&](i32 row) {
        const i64 first = static_cast<i64>(row) * a.hidden * bytes_of(type) / 16;
        const uint4* const rows = reinterpret_cast<const uint4*>(a.rows) + first;
        const uint4* const y = reinterpret_cast<const uint4*>(a.y) + first;
        uint4* const to = reinterpret_cast<uint4*>(a.to_y) + first;
        const float weight = reinterpret_cast<const float*>(a.weights)[row];
        float sum = 0.0f;
#pragma unroll 4
        for (i32 i = lane_id(); i < a.hidden / columns; i += kWarp) {
            float gradient[columns], scaled[columns];
            widen<type>(rows[i], gradient);
#pragma unroll
            for (i32 c = 0; c < columns; ++c) scaled[c] = weight * gradient[c];
            store_columns<type>(to + i, scaled);
            if (a.y == 0) continue;
            float made[columns];
            widen<type>(y[i], made);
#pragma unroll
            for (i32 c = 0; c < columns; ++c) sum += made[c] * gradient[c];
        }
        if (a.y == 0) return;
        sum = sum_of_warp(sum);
        if (lane_id() == 0) reinterpret_cast<float*>(a.to_weights)[row] = sum;
    });
}

}  // namespace moecomm
