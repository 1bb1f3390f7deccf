// Casts to the formats of payloads but fp8, which is in quantize.cuh. moecomm/base/formats.py specifies the arithmetic, and has the same
// bits: every operation below is one of fp32, rounded to nearest even. One thread calls each function, except where a comment says
// otherwise.
#pragma once
#include "cast.cuh"
#include "lanes.cuh"

namespace moecomm {

constexpr i32 kPieceColumns = 16;  // columns that a thread casts at once
constexpr u32 kNanBits = 0x7fc00000u, kInfinityBits = 0x7f800000u;

// A piece of a row, as it is in memory.
template <Type type>
struct Piece {
    u32 words[kPieceColumns * bytes_of(type) / 4];
};

template <Type type>
MOECOMM_FN u32 largest_magnitudes(const Piece<type>& piece) {
    u32 seen = 0;
#pragma unroll
    for (const u32 word : piece.words) seen = larger<type>(seen, magnitudes<type>(word));
    return seen;
}

// A scale as it is stored, and what values are multiplied with, or divided by: the specification says which.
struct ValueScale {
    float by;
    u32 bits;
};

// A global scale, as value_scale takes it.
struct GlobalScale {
    float reciprocal, over_largest;

    MOECOMM_FN GlobalScale() : GlobalScale(1.0f) {}
    MOECOMM_FN explicit GlobalScale(float given)
        : reciprocal(__fdiv_rn(1.0f, given)), over_largest(__fmul_rn(given, 1.0f / largest_of(Format::nvfp4))) {}
};

// Return the scale of columns with the maximum magnitude `amax`.
template <Format format>
MOECOMM_FN ValueScale value_scale(float amax, const GlobalScale& given) {
    constexpr float largest = largest_of(format);
    if constexpr (format == Format::fp8_tensor) {
        return {given.reciprocal, 0};
    } else if constexpr (format == Format::nvfp4) {
        const u32 narrow = narrow_e4m3(__fmul_rn(amax, given.over_largest), 0.0f) & 0xffu;
        const u32 size = narrow & 0x7fu, bits = size == 0x7fu ? size : narrow;
        const u32 sign = (bits & 0x80u) << 24;
        const float scale = size == 0x7fu ? __uint_as_float(kNanBits)  // e4m3 is fp32 without its low bits and with another bias
                                          : __fmul_rn(__uint_as_float(sign | size << 20), 0x1p120f);
        const float up = __fdiv_rn(1.0f, __fmul_rn(scale, given.reciprocal));
        constexpr float most = 0x1.fffffep127f;
        return {up > most ? most : up, bits};
    } else if constexpr (format == Format::mxfp8 || format == Format::mxfp4) {
        const u32 bits = __float_as_uint(__fdiv_rn(amax, largest)), exponent = bits >> 23;
        const u32 up = exponent + ((bits & 0x7fffffu) > (exponent == 0 ? 0x400000u : 0u) ? 1u : 0u);  // 2^-127 is subnormal
        const u32 biased = bits == kInfinityBits ? 254u : min(up, 255u);
        return {__uint_as_float(biased < 254u ? (254u - biased) << 23 : biased == 254u ? 0x400000u : kNanBits), biased};
    } else {
        constexpr float least = format == Format::int8_group ? 1e-10f : 0.0f, least_scale = 1.0f / (448.0f * 512.0f);
        float scale = __fdiv_rn(amax < least ? least : amax, largest);
        if (format == Format::fp8_token && scale < least_scale) scale = least_scale;
        const u32 bits = scale == scale ? __float_as_uint(scale) : kNanBits;
        if constexpr (format == Format::int8_token) return {__fdiv_rn(largest, amax), bits};  // zeros become NaN, and that 0
        return {scale, bits};
    }
}

// Round to an integer from -128 to 127, nearest even; NaN to 0. Return its low byte: adding 1.5 * 2^23 leaves it in the lowest bits.
MOECOMM_FN u32 narrow_int8(float value) {
    const float within = value == value ? fminf(fmaxf(value, -128.0f), 127.0f) : 0.0f;
    return __float_as_uint(__fadd_rn(within, 0x1.8p23f)) & 0xffu;
}

// Round eight columns to e2m1, nearest even, at most 6, and NaN to 6; the first is in the lowest bits. Hopper has no instruction for it.
//
// The ulp of a magnitude from 2^e to 2^(e + 1) is 2^(e - 1), where e is 0 to 2, and 0 for smaller ones. A sum with 2^(e + 22) is rounded to
// that: its lowest bits count ulps, which is the code less 2e, and its exponent, 149 + e, is at bit 23.
MOECOMM_FN u32 narrow_e2m1(const float* columns) {
    u32 codes = 0, signs = 0;
#pragma unroll
    for (i32 i = 0; i < 8; ++i) {
        const float size = fminf(fabsf(columns[i]), 6.0f);
        const float power = fmaxf(__uint_as_float(__float_as_uint(size) & kInfinityBits), 1.0f);
        const u32 sum = __float_as_uint(__fmaf_rn(power, 0x1p22f, size));
        codes = __funnelshift_r(codes, sum + (sum >> 22), 4);  // the code + 2 * 149
        signs = __funnelshift_l(__float_as_uint(columns[7 - i]), signs, 4);
    }
    return (((codes | 0x88888888u) - 0x22222222u) & 0x77777777u) | (signs & 0x88888888u);
}

// Divides values of 16 bits by a scale, rounded to nearest, with one division for all of them: a correction makes the product with the
// rounded reciprocal the quotient, for every significand that there is (tests/gpu/test_casts.py). The scale is 2^-41 or more, or NaN;
// quotients below 2^-11, which become zeros, are only near, with the right sign.
struct Divisor {
    float scale, reciprocal;

    MOECOMM_FN explicit Divisor(float by) : scale(by < __uint_as_float(kInfinityBits) ? by : 0.0f), reciprocal(__fdiv_rn(1.0f, by)) {}
    // By infinity the quotient is 0 or NaN, as the product is; the correction is then 0 or NaN, too.
    MOECOMM_FN float divide(float value) const {
        const float near = __fmul_rn(value, reciprocal);
        const u32 quotient = __float_as_uint(__fmaf_rn(__fmaf_rn(-near, scale, value), reciprocal, near));
        return __uint_as_float((quotient & 0x7fffffffu) | (__float_as_uint(value) & 0x80000000u));  // -0 would become 0
    }
};

// Scale the values of a piece.
template <Type type, Format format>
MOECOMM_FN void scale_values(const Piece<type>& piece, float scale, float (&values)[kPieceColumns]) {
    constexpr i32 each = 4 / bytes_of(type);
#pragma unroll
    for (i32 i = 0; i < kPieceColumns / each; ++i) widen_word<type>(piece.words[i], values + i * each);
    if constexpr (format != Format::fp8_token && format != Format::int8_group) {
#pragma unroll
        for (float& value : values) value = __fmul_rn(value, scale);
    } else if constexpr (type == Type::fp32) {
#pragma unroll
        for (float& value : values) value = __fdiv_rn(value, scale);
    } else {
        const Divisor divisor(scale);
#pragma unroll
        for (float& value : values) value = divisor.divide(value);
    }
}

// Cast a piece to the words of its values.
template <Type type, Format format>
MOECOMM_FN void narrow_piece(const Piece<type>& piece, const ValueScale& scale, u32 (&out)[kPieceColumns * bits_of(format) / 32]) {
    constexpr i32 in_word = 32 / bits_of(format);
    float values[kPieceColumns];
    scale_values<type, format>(piece, scale.by, values);
#pragma unroll
    for (i32 i = 0; i < kPieceColumns / in_word; ++i) {
        const float* const of_word = values + i * in_word;
        out[i] = 0;
        if constexpr (is_e2m1(format)) {
            out[i] = narrow_e2m1(of_word);
            if (scale.by != scale.by) out[i] = 0x77777777u;  // NaN counts as 6
        } else if constexpr (is_int8(format)) {
#pragma unroll
            for (i32 k = 0; k < in_word; ++k) out[i] |= narrow_int8(of_word[k]) << 8 * k;
        } else {
            const u32 four = narrow_e4m3(of_word[0], of_word[1]) | narrow_e4m3(of_word[2], of_word[3]) << 16;
            out[i] = four & ~(((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u);  // NaN loses its sign
        }
    }
}

// Store the scale of a group, the `nth` of its row.
template <Format format>
MOECOMM_FN void store_scale(void* scales, i64 nth, const ValueScale& scale) {
    if constexpr (format == Format::int8_group) {
        static_cast<u32*>(scales)[nth] = scale.bits;
    } else {
        static_cast<u8*>(scales)[nth] = static_cast<u8>(scale.bits);
    }
}

// Called by all lanes of a warp. Cast `columns` columns at `from`, complete groups of them, to values at `to` and a scale for each group,
// if it has one, at `scales`, all in shared memory that the warp may access. Orders no memory, and can't fail.
//
// A lane casts 16 columns, those of a step next to those of its neighbors. Where these are 32 bytes, every second four lanes read the upper
// half first: no two of the eight lanes that are served together then want the same bank. `steps` steps are interleaved.
template <Type type, Format format, i32 columns, i32 steps>
MOECOMM_FN void cast_columns(u8* to, const u8* from, u8* scales, const GlobalScale& given) {
    constexpr i32 group = group_of(format), lanes = group == 0 ? 1 : group / kPieceColumns, of_step = kWarp * kPieceColumns;
    constexpr i32 vectors = sizeof(Piece<type>) / 16, words = kPieceColumns * bits_of(format) / 32;
    static_assert(!is_scaled_by_row(format) && columns % (lanes * kPieceColumns) == 0);
    const i32 half = vectors == 2 ? lane_id() / 4 % 2 : 0;
#pragma unroll 1
    for (i32 begin = 0; begin < columns; begin += steps * of_step) {
        Piece<type> piece[steps];
        ValueScale scale[steps];
        const auto column = [&](i32 step) { return begin + step * of_step + lane_id() * kPieceColumns; };
        const auto has = [&](i32 step) { return columns % (steps * of_step) == 0 || column(step) < columns; };
#pragma unroll
        for (i32 s = 0; s < steps; ++s) {
            const auto* const row = reinterpret_cast<const uint4*>(from + column(s) * bytes_of(type));
#pragma unroll
            for (i32 i = 0; i < vectors; ++i) {
                const uint4 four = has(s) ? row[i ^ half] : make_uint4(0, 0, 0, 0);
                u32* const held = piece[s].words + 4 * i;
                held[0] = four.x, held[1] = four.y, held[2] = four.z, held[3] = four.w;
            }
        }
#pragma unroll
        for (i32 s = 0; s < steps; ++s) {
            const float amax = group == 0 ? 0.0f : largest_in_group<type, lanes>(largest_magnitudes<type>(piece[s]));
            scale[s] = value_scale<format>(amax, given);
        }
#pragma unroll
        for (i32 s = 0; s < steps; ++s) {
            u32 out[words];
            narrow_piece<type, format>(piece[s], scale[s], out);
            if (!has(s)) continue;
            u8* const values = to + column(s) * bits_of(format) / 8;
            if constexpr (words == 2) {
                *reinterpret_cast<uint2*>(values) = half != 0 ? make_uint2(out[1], out[0]) : make_uint2(out[0], out[1]);
            } else {
                *reinterpret_cast<uint4*>(values) =
                    half != 0 ? make_uint4(out[2], out[3], out[0], out[1]) : make_uint4(out[0], out[1], out[2], out[3]);
            }
            if constexpr (group != 0) {
                if (lane_id() % lanes == 0) store_scale<format>(scales, column(s) / group, scale[s]);
            }
        }
    }
}

}  // namespace moecomm
