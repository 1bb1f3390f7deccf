// Scales of rows and channels, biases, and activations other than SwiGLU without a limit, in the accumulator registers of a tile, between
// its last product and its epilogue, in this order.
//
// The arithmetic is written with intrinsics, so that no compiler contracts it in one kernel and not in another: the bits of a product do
// not depend on the kernel that it is computed in.
#pragma once
#include "config.cuh"
#include "epilogue_rows.cuh"

namespace moecomm {

constexpr float kGeluCubic = 0.044715f, kGeluSlope = 0.7978845608f, kHalfRoot = 0.7071067812f;  // sqrt(2 / pi), sqrt(1 / 2)

// Returns x times the sigmoid of y.
MOECOMM_FN float times_sigmoid(float x, float y) { return __fdividef(x, __fadd_rn(1.0f, __expf(-y))); }

// Return x, bounded by the limit from above or from both sides.  NaNs pass.
MOECOMM_FN float at_most(const GemmArgs& args, float x) { return x > args.limit ? args.limit : x; }
MOECOMM_FN float within(const GemmArgs& args, float x) { return x > args.limit ? args.limit : x < -args.limit ? -args.limit : x; }

// Returns the activated value, for activations that the epilogue does not compute.
template <GemmConfig c>
MOECOMM_FN float activated(const GemmArgs& args, float gate, float up) {
    if constexpr (c.activation == Activation::geglu) {
        return __fmul_rn(__fmul_rn(__fmul_rn(0.5f, gate), __fadd_rn(1.0f, erff(__fmul_rn(gate, kHalfRoot)))), up);
    } else if constexpr (c.activation == Activation::geglu_tanh) {  // (1 + tanh(y)) / 2 is the sigmoid of 2 y
        const float slope = __fmaf_rn(2.0f * kGeluSlope * kGeluCubic, __fmul_rn(gate, gate), 2.0f * kGeluSlope);
        return __fmul_rn(times_sigmoid(gate, __fmul_rn(gate, slope)), up);
    } else if constexpr (c.activation == Activation::swiglustep) {
        return __fmul_rn(at_most(args, times_sigmoid(gate, gate)), within(args, up));
    } else if constexpr (c.activation == Activation::swiglu_limited) {
        gate = at_most(args, gate);
        return __fmul_rn(times_sigmoid(gate, gate), within(args, up));
    } else {
        static_assert(c.activation == Activation::swigluoai, "SwiGLU without a limit is computed by the epilogue");
        gate = at_most(args, gate);
        up = within(args, up);
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

// The scales that a lane has of a tile, with GemmConfig::channel_scales: loaded before the tile's products, so that these hide the latency,
// and applied after them.  Empty without such scales.
template <GemmConfig c, bool = c.channel_scales>
struct ChannelScales {
    template <GemmConfig product>
    MOECOMM_FN void load(const GemmArgs&, const Tile&, i32, i32) {}
    template <i32 size>
    MOECOMM_FN void apply(float (&)[size], const Tile&, u32, i32, u32&) const {}
};
template <GemmConfig c>
struct ChannelScales<c, true> {
    static_assert(c.swapped && c.parts() == 1 && c.most_rows <= 2 * kWarpgroup, "a thread loads the scales of two rows of the tile");
    float of_w[2];     // of the lane's two rows of w
    float of_rows[2];  // of rows 2 t and 2 t + 1 of the tile, t: the thread's place in its warpgroup

    // Called by a math warpgroup once the tile's rows and their scales have arrived.  Scales of rows are read past L1.  Padding rows, which
    // are not stored, take the last row's; rows beyond the end of w have the last row's.  `product`: configuration of the tile's product.
    template <GemmConfig product>
    MOECOMM_FN void load(const GemmArgs& args, const Tile& tile, i32 block, i32 math_group) {
        const i32 lane = lane_id(), row = block * product.block_columns() + math_group * kPartColumns + warp_id() % 4 * 16 + lane / 4;
        const float* const of_group = reinterpret_cast<const float*>(args.w_scales) + static_cast<i64>(tile.group) * args.columns;
        const i32* const of_x = reinterpret_cast<const i32*>(args.x_scales) + tile.row * args.x_scale_row;
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const i32 at = row + i * kWoven, nth = min(static_cast<i32>(threadIdx.x % kWarpgroup) * 2 + i, tile.rows - 1);
            of_w[i] = of_group[min(product.apart ? apart_row(at, args.columns / 2) : at, args.columns - 1)];
            of_rows[i] = __int_as_float(load_fresh(of_x + nth * args.x_scale_row));
        }
    }
    // Multiplies the accumulators by the product of their two scales.  Called by the warpgroup; `staging`, `barrier` and `turns` as in
    // store_tile: passing the scales of rows to all lanes is a staging step.
    template <i32 size>
    MOECOMM_FN void apply(float (&accum)[size], const Tile& tile, u32 staging, i32 barrier, u32& turns) const {
        const u32 place = staging + turns++ % 2 * c.stage_bytes();
        if (2 * (threadIdx.x % kWarpgroup) < c.most_rows)
            store_shared_words(place + threadIdx.x % kWarpgroup * 8, __float_as_uint(of_rows[0]), __float_as_uint(of_rows[1]));
        barrier_sync(barrier, kWarpgroup);
        const u32 mine = place + lane_id() % 4 * 8;
#pragma unroll
        for (i32 j = 0; j < size / 4; ++j) {
            if (8 * j >= tile.rows) continue;
            const float2 rows = load_shared_pair(mine + 32 * j);
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                float& sum = accum[4 * j + i];
                sum = __fmul_rn(sum, __fmul_rn(i % 2 == 0 ? rows.x : rows.y, of_w[i / 2]));
            }
        }
    }
};

// Finishes the accumulators that a math warpgroup holds of a tile in column block `block`.  Called by the whole warpgroup, for products
// with GemmConfig::finishes().
template <GemmConfig c, i32 size>
MOECOMM_FN void finish(float (&accum)[c.parts()][size], const GemmArgs& args, const Tile& tile, i32 block, i32 math_group) {
    const Biases<c> biases(args, tile.group);
    const i32 lane = lane_id(), first = block * c.block_columns();
    if constexpr (c.swapped) {  // a lane has two rows of w, 8 from each other, and all rows of x
#pragma unroll
        for (i32 part = 0; part < c.parts(); ++part) {
            const i32 row = first + (math_group * c.parts() + part) * kPartColumns + warp_id() % 4 * 16 + lane / 4;
            const float one = biases.at(row), other = biases.at(row + kWoven);
            const float ones[2] = {one, one}, others[2] = {other, other};
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
