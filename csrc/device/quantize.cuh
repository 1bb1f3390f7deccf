// Cast of rows by warps: to e4m3 with one scale for 128 columns, of registers to int8 as well, or for a dispatch to any format. All lanes
// of one warp call each function, on shared memory that the warp may read; no function orders memory or can fail.
#pragma once
#include "format_casts.cuh"

namespace moecomm {

constexpr i32 kQuad = 4;                                   // lanes that share a group of 128 columns and its scale
constexpr i32 kEights = kQuantGroup / 8 / kQuad;           // vectors of 8 columns of a group that a lane casts
constexpr i32 kStepColumns = kWarp / kQuad * kQuantGroup;  // columns that a warp casts in a step

// Cast this lane's n columns of several groups to `type`, e4m3 or int8, each of which kQuantGroup / n neighboring lanes hold; a lane
// without columns of a group has zeros. `bits`: the scales of its groups as they travel.
template <Type type, i32 groups, i32 n>
MOECOMM_FN void quantize_registers(const float (&columns)[groups][n], u32 (&out)[groups][n / 4], u32 (&bits)[groups]) {
    float seen[groups];
#pragma unroll
    for (i32 g = 0; g < groups; ++g) {
        float largest = 0.0f;
#pragma unroll
        for (i32 i = 0; i < n; ++i) largest = larger_magnitude(largest, columns[g][i]);
        seen[g] = largest_in_group<Type::fp32, kQuantGroup / n>(__float_as_uint(largest));
    }
    if constexpr (type == Type::int8) {
#pragma unroll
        for (i32 g = 0; g < groups; ++g) {
            const float scale = int8_group_scale(seen[g]), reciprocal = __fdiv_rn(1.0f, scale);
            bits[g] = __float_as_uint(scale);
#pragma unroll
            for (i32 i = 0; i < n / 4; ++i) out[g][i] = narrow_int8_group(columns[g] + 4 * i, scale, reciprocal);
        }
        return;
    }
    GroupScale scale[groups];
    group_scales<ScaleFormat::fp32>(seen, scale);
#pragma unroll
    for (i32 g = 0; g < groups; ++g) {
        const float up = scale[g].up;
        bits[g] = scale[g].bits;
#pragma unroll
        for (i32 i = 0; i < n / 4; ++i) {
            const float* four = columns[g] + 4 * i;
            out[g][i] = narrow_e4m3(__fmul_rn(four[0], up), __fmul_rn(four[1], up)) |
                        narrow_e4m3(__fmul_rn(four[2], up), __fmul_rn(four[3], up)) << 16;
        }
    }
}

// Cast `columns` columns (a multiple of 8) at `from` to e4m3 at `to`, and store one scale for each group at `scales`.
//
// Four lanes share a group, which needs fewer shuffles and divisions a column than more lanes would. Neighboring groups read their vectors
// in different orders, which avoids bank conflicts in shared memory. A step is a chain of dependent instructions, and few warps of an SM
// cast, so the steps of one call are interleaved.
template <Type type, ScaleFormat format, i32 columns>
MOECOMM_FN void quantize_steps(u8* to, const u8* from, u8* scales) {
    constexpr i32 steps = ceil_div(columns, kStepColumns), vectors = 8 / columns_in_16(type);
    const i32 quad = lane_id() / kQuad;
    const auto group_of = [&](i32 step) { return step * (kWarp / kQuad) + quad; };
    const auto column = [&](i32 step, i32 i) {
        return group_of(step) * kQuantGroup + 8 * (lane_id() % kQuad + kQuad * ((i + quad) % kEights));
    };
    const auto has = [&](i32 step, i32 at) { return (step + 1) * kStepColumns <= columns || at < columns; };
    uint4 words[steps][kEights][vectors];
    GroupScale scale[steps];
#pragma unroll
    for (i32 s = 0; s < steps; ++s) {
#pragma unroll
        for (i32 i = 0; i < kEights; ++i) {
#pragma unroll
            for (i32 v = 0; v < vectors; ++v) {
                words[s][i][v] = make_uint4(0, 0, 0, 0);
                if (has(s, column(s, i))) words[s][i][v] = reinterpret_cast<const uint4*>(from + column(s, i) * bytes_of(type))[v];
            }
        }
    }
    float largest[steps];
#pragma unroll
    for (i32 s = 0; s < steps; ++s) {
        u32 seen = 0;
#pragma unroll
        for (i32 i = 0; i < kEights; ++i) {
#pragma unroll
            for (i32 v = 0; v < vectors; ++v) seen = larger<type>(seen, largest_magnitudes<type>(words[s][i][v]));
        }
        largest[s] = largest_in_group<type, kQuad>(seen);
    }
    group_scales<format>(largest, scale);
#pragma unroll
    for (i32 s = 0; s < steps; ++s) {
#pragma unroll
        for (i32 i = 0; i < kEights; ++i)
            if (has(s, column(s, i))) *reinterpret_cast<uint2*>(to + column(s, i)) = narrow_eight<type>(words[s][i], scale[s].up);
        if (lane_id() % kQuad == 0 && has(s, group_of(s) * kQuantGroup)) {
            if constexpr (format == ScaleFormat::fp32) reinterpret_cast<u32*>(scales)[group_of(s)] = scale[s].bits;
            if constexpr (format == ScaleFormat::ue8m0) scales[group_of(s)] = static_cast<u8>(scale[s].bits);
        }
    }
}

// quantize_steps for any number of columns, `steps` steps at a time.
template <Type type, ScaleFormat format, i32 columns, i32 steps>
MOECOMM_FN void quantize_columns(u8* to, const u8* from, u8* scales) {
    constexpr i32 abreast = steps * kStepColumns, rest = columns % abreast;
    constexpr i32 groups = abreast / kQuantGroup * (format == ScaleFormat::fp32 ? 4 : 1);
#pragma unroll 1
    for (i32 i = 0; i < columns / abreast; ++i)
        quantize_steps<type, format, abreast>(to + i * abreast, from + i * abreast * bytes_of(type), scales + i * groups);
    constexpr i32 n = columns / abreast;
    if constexpr (rest > 0) quantize_steps<type, format, rest>(to + n * abreast, from + n * abreast * bytes_of(type), scales + n * groups);
}

// Cast the piece of a row of `hidden` columns that begins at `column`: `most` columns, or the rest. `steps` steps are interleaved.
template <Type type, ScaleFormat format, i32 hidden, i32 most, i32 steps>
MOECOMM_FN void quantize_piece(i32 column, u8* to, const u8* from, u8* scales) {
    constexpr i32 rest = hidden % most;
    if (rest == 0 || column + most <= hidden) {
        quantize_columns<type, format, most, steps>(to, from, scales);
    } else if constexpr (rest > 0) {
        quantize_columns<type, format, rest, steps>(to, from, scales);
    }
}
// quantize_piece for a dispatch, in its format. `given`: the global scale of formats that take one.
template <DispatchConfig cfg, i32 most>
MOECOMM_FN void quantize_piece(i32 column, u8* to, const u8* from, u8* scales, const GlobalScale& given) {
    // Interleave as many steps as registers allow.
    constexpr i32 steps = cfg.type == Type::fp32 || (cfg.warps() > 16 && !cfg.packets) ? 1 : 2, rest = cfg.hidden % most;
    if constexpr (cfg.format == Format::fp8) {
        quantize_piece<cfg.type, cfg.scale_format, cfg.hidden, most, steps>(column, to, from, scales);
    } else if (rest == 0 || column + most <= cfg.hidden) {
        cast_columns<cfg.type, cfg.format, most, steps>(to, from, scales, given);
    } else if constexpr (rest > 0) {
        cast_columns<cfg.type, cfg.format, rest, steps>(to, from, scales, given);
    }
}

}  // namespace moecomm
