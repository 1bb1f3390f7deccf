// Scales of rows and channels, biases, and activations other than SwiGLU, in the accumulator registers of a tile, between its last product
// and its epilogue.
//
// The arithmetic is written with intrinsics, so that no compiler contracts it in one kernel and not in another: the bits of a product do
// not depend on the kernel that it is computed in.
#pragma once
#include "config.cuh"
#include "scaled_rows.cuh"

namespace moecomm {

constexpr float kGeluCubic = 0.044715f, kGeluSlope = 0.7978845608f, kHalfRoot = 0.7071067812f;  // sqrt(2 / pi), sqrt(1 / 2)

// Returns x times the sigmoid of y.
MOECOMM_FN float times_sigmoid(float x, float y) { return __fdividef(x, __fadd_rn(1.0f, __expf(-y))); }

// Returns the activated value, for activations other than SwiGLU.  NaNs pass through the limits.
template <GemmConfig c>
MOECOMM_FN float activated(const GemmArgs& args, float gate, float up) {
    if constexpr (c.activation == Activation::geglu) {
        return __fmul_rn(__fmul_rn(__fmul_rn(0.5f, gate), __fadd_rn(1.0f, erff(__fmul_rn(gate, kHalfRoot)))), up);
    } else if constexpr (c.activation == Activation::geglu_tanh) {  // (1 + tanh(y)) / 2 is the sigmoid of 2 y
        const float slope = __fmaf_rn(2.0f * kGeluSlope * kGeluCubic, __fmul_rn(gate, gate), 2.0f * kGeluSlope);
        return __fmul_rn(times_sigmoid(gate, __fmul_rn(gate, slope)), up);
    } else {
        static_assert(c.activation == Activation::swigluoai, "SwiGLU is computed by the epilogue");
        gate = gate > args.limit ? args.limit : gate;
        up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
        return __fmul_rn(__fadd_rn(up, 1.0f), times_sigmoid(gate, __fmul_rn(args.alpha, gate)));
    }
}

// Returns the row of w in memory, with all gate rows before all `half` up rows, of row `row` in the ring.
MOECOMM_FN i32 apart_row(i32 row, i32 half) { return row / kWoven % 2 * half + min(row / (2 * kWoven) * kWoven + row % kWoven, half - 1); }

// The biases of a group.
template <GemmConfig c>
struct Biases {
    const float* of_group;
    i32 columns;

    MOECOMM_FN Biases(const GemmArgs& args, i32 group)
        : of_group(args.bias == 0 ? nullptr : reinterpret_cast<const float*>(args.bias) + static_cast<i64>(group) * args.columns),
          columns(args.columns) {}
    // Returns the bias of row `row` of w as it lies in the ring, counted over all blocks.  Rows beyond the end of w have the last row's;
    // their products are not stored.
    MOECOMM_FN float at(i32 row) const {
        if (!c.bias || of_group == nullptr) return -0.0f;  // which changes no bit of a sum
        if constexpr (!c.gated) return of_group[min(row, columns - 1)];
        return of_group[apart_row(row, columns / 2)];
    }
};

// Adds two biases to four accumulators, first[0], first[1], second[0] and second[1]; with `gated`, `first` are gates, which the activated
// values replace.
template <GemmConfig c>
MOECOMM_FN void finish_four(const GemmArgs& args, float* first, float* second, const float (&of_first)[2], const float (&of_second)[2]) {
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
        if constexpr (c.bias) {
            first[i] = __fadd_rn(first[i], of_first[i]);
            second[i] = __fadd_rn(second[i], of_second[i]);
        }
        if constexpr (c.gated && c.activation != Activation::swiglu) first[i] = activated<c>(args, first[i], second[i]);
    }
}

// The scales of a tile with GemmConfig::channel_scales, for swapped operands.
template <GemmConfig c>
struct ChannelScales {
    const float *of_group, *of_x;
    i32 columns, last;
    i64 step;

    MOECOMM_FN ChannelScales(const GemmArgs& args, const Tile& tile)
        : of_group(reinterpret_cast<const float*>(args.w_scales) + static_cast<i64>(tile.group) * args.columns),
          of_x(reinterpret_cast<const float*>(args.x_scales) + tile.row * args.x_scale_row),
          columns(args.columns),
          last(tile.rows - 1),
          step(args.x_scale_row) {}
    // Returns the scale of row `row` of w as it lies in the ring; see Biases.
    MOECOMM_FN float of_w(i32 row) const { return of_group[min(c.apart ? apart_row(row, columns / 2) : row, columns - 1)]; }
    // Multiplies the accumulators of rows `row` and `row` + 1 of the tile and two rows of w with these scales.  Padding rows, which are not
    // stored, take the last row's scale.
    MOECOMM_FN void multiply(float* accum, i32 row, float of_first, float of_second) const {
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const float of_row = of_x[min(row + i, last) * step];
            accum[i] = __fmul_rn(accum[i], __fmul_rn(of_row, of_first));
            accum[2 + i] = __fmul_rn(accum[2 + i], __fmul_rn(of_row, of_second));
        }
    }
};

// Finishes the accumulators that a math warpgroup holds of a tile in column block `block`.  Called by the whole warpgroup, for products
// with GemmConfig::finishes().
template <GemmConfig c, i32 size>
MOECOMM_FN void finish(float (&accum)[c.parts()][size], const GemmArgs& args, const Tile& tile, i32 block, i32 math_group) {
    static_assert(c.swapped || !c.channel_scales, "channel scales are for swapped operands");
    const Biases<c> biases(args, tile.group);
    const i32 lane = lane_id(), first = block * c.block_columns();
    if constexpr (c.swapped) {  // a lane has two rows of w, 8 from each other, and all rows of x
#pragma unroll
        for (i32 part = 0; part < c.parts(); ++part) {
            const i32 row = first + (math_group * c.parts() + part) * kPartColumns + warp_id() % 4 * 16 + lane / 4;
            const float one = biases.at(row), other = biases.at(row + kWoven);
            const float ones[2] = {one, one}, others[2] = {other, other};
            if constexpr (c.channel_scales) {
                const ChannelScales<c> scales(args, tile);
                const float of_first = scales.of_w(row), of_second = scales.of_w(row + kWoven);
#pragma unroll
                for (i32 j = 0; j < size / 4; ++j)
                    if (8 * j < tile.rows) scales.multiply(accum[part] + 4 * j, 8 * j + lane % 4 * 2, of_first, of_second);
            }
#pragma unroll
            for (i32 j = 0; j < size / 4; ++j)
                if (8 * j < tile.rows) finish_four<c>(args, accum[part] + 4 * j, accum[part] + 4 * j + 2, ones, others);
        }
    } else {  // a lane has two rows of x, and two of each 8 rows of w
        const Share<c> share(tile.rows, math_group);
#pragma unroll
        for (i32 part = 0; part < c.parts(); ++part) {
            if (part > 0 && !share.all_parts) break;
            const i32 row = first + (share.first_part + part) * kRowsPart + lane % 4 * 2;
#pragma unroll
            for (i32 j = 0; j < size / 4; j += 2) {
                const i32 at = row + 8 * j;
                const float ones[2] = {biases.at(at), biases.at(at + 1)}, others[2] = {biases.at(at + 8), biases.at(at + 9)};
#pragma unroll
                for (i32 half = 0; half < 2; ++half)
                    finish_four<c>(args, accum[part] + 4 * j + 2 * half, accum[part] + 4 * j + 4 + 2 * half, ones, others);
            }
        }
    }
}

}  // namespace moecomm
