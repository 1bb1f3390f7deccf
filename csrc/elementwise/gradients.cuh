// Gradients in one pass over the rows: those of a weighted combine, and of the part of SwiGLU experts between their GEMMs.
#pragma once
#include "../device/cast.cuh"
#include "row_pass.cuh"

namespace moecomm {

// Gradients of y and of the weights. Called by all threads of the grid; one warp a row.
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

// What SwigluArgs::limit bounds from above; up is then within it on both sides.
enum class Limited : i32 { nothing, gate, silu };

// Return x, bounded from above or from both sides.  NaNs pass.
template <bool limited>
MOECOMM_FN float at_most(float x, float limit) {
    return limited && x > limit ? limit : x;
}
template <bool limited>
MOECOMM_FN float within(float x, float limit) {
    return limited && x < -limit ? -limit : at_most<limited>(x, limit);
}

// Called by all threads of the grid; one warp a row.  Derivatives beyond a limit are 0.
template <Type type, Limited limited>
MOECOMM_FN void swiglu_gradients(const SwigluArgs& a) {
    constexpr i32 n = columns_in_16(type);
    const i32 end = min(a.count, *reinterpret_cast<const i32*>(a.end));
    each_row(end, [&](i32 row) {
        const i64 at_inner = static_cast<i64>(row) * a.columns * bytes_of(type), at_both = 2 * at_inner;
        const float weight = reinterpret_cast<const float*>(a.weights)[row];
        float sum = 0.0f;
#pragma unroll 2
        for (i32 column = lane_id() * n; column < a.columns; column += kWarp * n) {
            const i64 gate_at = at_both + (column / a.width * 2 * a.width + column % a.width) * bytes_of(type);
            const i64 up_at = gate_at + a.width * bytes_of(type), here = at_inner + column * bytes_of(type);
            float gate[n], up[n], gradient[n], made[n], gate_grad[n], up_grad[n];
            widen<type>(*reinterpret_cast<const uint4*>(a.both + gate_at), gate);
            widen<type>(*reinterpret_cast<const uint4*>(a.both + up_at), up);
            widen<type>(*reinterpret_cast<const uint4*>(a.inner + here), gradient);
#pragma unroll
            for (i32 i = 0; i < n; ++i) {
                const float bounded = at_most<limited == Limited::gate>(gate[i], a.limit);
                const float sigmoid = 1.0f / (1.0f + expf(-bounded)), silu = bounded * sigmoid, weighted = gradient[i] * weight;
                const float one = at_most<limited == Limited::silu>(silu, a.limit);
                const float other = within<limited != Limited::nothing>(up[i], a.limit);
                const bool gate_beyond = bounded < gate[i] || one < silu, up_beyond = other < up[i] || other > up[i];
                sum += one * other * gradient[i];
                made[i] = one * other * weight;
                gate_grad[i] = gate_beyond ? 0.0f : weighted * other * (sigmoid + silu * (1.0f - sigmoid));
                up_grad[i] = up_beyond ? 0.0f : weighted * one;
            }
            store_columns<type>(reinterpret_cast<void*>(a.to_both + gate_at), gate_grad);
            store_columns<type>(reinterpret_cast<void*>(a.to_both + up_at), up_grad);
            store_columns<type>(reinterpret_cast<void*>(a.to_inner + here), made);
        }
        sum = sum_of_warp(sum);
        if (lane_id() == 0) reinterpret_cast<float*>(a.to_weights)[row] = sum;
    });
}

}  // namespace moecomm
