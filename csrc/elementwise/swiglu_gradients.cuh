// Elementwise part of the backward pass of SwiGLU experts, between its GEMMs, in one pass over the rows.
#pragma once
#include "../device/cast.cuh"
#include "row_pass.cuh"

namespace moecomm {

struct SwigluArgs {
    u64 both;                           // [rows][2 I]: `width` gate columns, then `width` up columns, and so on
    u64 inner;                          // [rows][I]: gradient of silu(gate) * up, without the routing weight
    u64 weights;                        // float [rows], the routing weights
    u64 to_both, to_inner, to_weights;  // gradients of `both`; silu(gate) * up times the weight; gradients of weights
    u64 end;                            // i32: rows from here on are unused and stay as they are
    i32 count, columns, width, pad;     // rows; I; see `both`
};
static_assert(sizeof(SwigluArgs) == 72, "as swiglu.py packs it");

// Called by all threads of the grid; one warp a row.
template <Type type>
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
                const float sigmoid = 1.0f / (1.0f + expf(-gate[i])), silu = gate[i] * sigmoid, weighted = gradient[i] * weight;
                sum += silu * up[i] * gradient[i];
                made[i] = silu * up[i] * weight;
                gate_grad[i] = weighted * up[i] * (sigmoid + silu * (1.0f - sigmoid));
                up_grad[i] = weighted * silu;
            }
            store_columns<type>(reinterpret_cast<void*>(a.to_both + gate_at), gate_grad);
            store_columns<type>(reinterpret_cast<void*>(a.to_both + up_at), up_grad);
            store_columns<type>(reinterpret_cast<void*>(a.to_inner + here), made);
        }
#pragma unroll
        for (i32 lane = 1; lane < kWarp; lane *= 2) sum += __shfl_xor_sync(kAllLanes, sum, lane);
        if (lane_id() == 0) reinterpret_cast<float*>(a.to_weights)[row] = sum;
    });
}

}  // namespace moecomm
