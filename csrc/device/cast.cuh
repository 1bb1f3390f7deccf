// Cast between row types and fp32, 16 bytes of a row at a time, with the same bits as csrc/host/casts.h. One thread calls each function,
// except where a comment says otherwise; none orders memory or can fail.
#pragma once
#include "config.cuh"

namespace moecomm {

MOECOMM_BOTH constexpr i32 columns_in_16(Type type) { return 16 / bytes_of(type); }

// Convert two columns of e4m3 to fp16. Exact.
MOECOMM_FN u32 e4m3_to_fp16(u16 both) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(both));
    return halves;
}

MOECOMM_FN u32 byte_of(u32 word, i32 nth) { return word >> 8 * nth & 0xffu; }

// Convert 4 bytes of a row to fp32; widen converts 16 bytes. Exact.
template <Type type>
MOECOMM_FN void widen_word(u32 word, float* out) {
    if constexpr (type == Type::e4m3) {
        widen_word<Type::fp16>(e4m3_to_fp16(static_cast<u16>(word)), out);
        widen_word<Type::fp16>(e4m3_to_fp16(static_cast<u16>(word >> 16)), out + 2);
    } else if constexpr (type == Type::int8) {  // 2^23 + 128 + the value has it, plus 128, in its low byte
        const u32 shifted = word ^ 0x80808080u;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) out[i] = __fadd_rn(__uint_as_float(byte_of(shifted, i) | 0x4b000000u), -0x1p23f - 128.0f);
    } else if constexpr (type == Type::fp32) {
        out[0] = __uint_as_float(word);
    } else if constexpr (type == Type::bf16) {
        out[0] = __uint_as_float(word << 16);
        out[1] = __uint_as_float(word & 0xffff0000u);
    } else {
        asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
            : "=f"(out[0]), "=f"(out[1])
            : "r"(word));
    }
}
template <Type type>
MOECOMM_FN void widen(const uint4& words, float* out) {
    constexpr i32 each = columns_in_16(type) / 4;
    widen_word<type>(words.x, out);
    widen_word<type>(words.y, out + each);
    widen_word<type>(words.z, out + 2 * each);
    widen_word<type>(words.w, out + 3 * each);
}

// Round to nearest even. `in` holds 4 bytes' worth of columns.
template <Type type>
MOECOMM_FN u32 narrow_word(const float* in) {
    u32 word;
    if constexpr (type == Type::fp32) {
        word = __float_as_uint(in[0]);
    } else if constexpr (type == Type::bf16) {
        asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(in[0]), "f"(in[1]));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(in[0]), "f"(in[1]));
    }
    return word;
}

// Store n columns at `to`, which is aligned to min(their bytes, 16).
template <Type type, i32 n>
MOECOMM_FN void store_columns(void* to, const float (&in)[n]) {
    constexpr i32 words = n * bytes_of(type) / 4, each = n / words;
    u32 out[words];
#pragma unroll
    for (i32 i = 0; i < words; ++i) out[i] = narrow_word<type>(in + i * each);
    if constexpr (words == 1) {
        *static_cast<u32*>(to) = out[0];
    } else if constexpr (words == 2) {
        *static_cast<uint2*>(to) = make_uint2(out[0], out[1]);
    } else {
#pragma unroll
        for (i32 i = 0; i < words; i += 4) static_cast<uint4*>(to)[i / 4] = make_uint4(out[i], out[i + 1], out[i + 2], out[i + 3]);
    }
}
// Load n columns from `from`, which is aligned to 4 bytes.
template <Type type, i32 n>
MOECOMM_FN void load_columns(const void* from, float (&out)[n]) {
    constexpr i32 words = n * bytes_of(type) / 4, each = n / words;
#pragma unroll
    for (i32 i = 0; i < words; ++i) widen_word<type>(static_cast<const u32*>(from)[i], out + i * each);
}

// Cast two columns to e4m3, rounded to nearest even; the low byte is the first column.
MOECOMM_FN u32 narrow_e4m3(float first, float second) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(both) : "f"(first), "f"(second));
    return both;
}

// Maximum of magnitudes as bits: two 16-bit columns a word, or one 32-bit column. A NaN is the largest value.
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
template <Type type>
MOECOMM_FN u32 largest_magnitudes(const uint4& w) {
    return larger<type>(larger<type>(magnitudes<type>(w.x), magnitudes<type>(w.y)),
                        larger<type>(magnitudes<type>(w.z), magnitudes<type>(w.w)));
}
// The larger of a magnitude and that of `column`, by one instruction; NaN if one is.
MOECOMM_FN float larger_magnitude(float magnitude, float column) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(magnitude), "f"(fabsf(column)));
    return larger;
}
// Maximum magnitude, as fp32, of a column group that `lanes` neighboring lanes share. All lanes of the warp call it.
template <Type type, i32 lanes>
MOECOMM_FN float largest_in_group(u32 largest) {
    if constexpr (type != Type::fp32) largest = larger<type>(largest, largest >> 16);
#pragma unroll
    for (i32 lane = 1; lane < lanes; lane *= 2) largest = larger<type>(largest, __shfl_xor_sync(kAllLanes, largest, lane));
    if constexpr (type == Type::fp32) {
        return __uint_as_float(largest);
    } else {
        float both[2];
        widen_word<type>(largest, both);
        return both[0];
    }
}

// Multiply eight columns by `up` and cast them to e4m3.
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

// Factor by which a column group is multiplied, and its scale as it travels.
struct GroupScale {
    float up;
    u32 bits;
};

// Return amax / 448, rounded to nearest, for amax >= 1e-4: a product with the rounded reciprocal, then a correction. Branch-free.
MOECOMM_FN float over_448(float amax) {
    constexpr float part = 1.0f / 448.0f;
    const float near = __fmul_rn(amax, part);
    return __float_as_uint(amax) >= 0x7f800000u ? near : __fmaf_rn(__fmaf_rn(near, -448.0f, amax), part, near);
}
// Return 1 / amax, rounded to nearest, for amax from 1e-4 to 2^126: reciprocal() corrects the hardware's approximation, which is within one
// bit.
MOECOMM_FN float near_reciprocal(float amax) {
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(amax));
    return near;
}
MOECOMM_FN float reciprocal(float amax) {
    const float near = near_reciprocal(amax);
    return __fmaf_rn(__fmaf_rn(near, -amax, 1.0f), near, near);
}
// Scale of a group with maximum magnitude `seen` below 2^126; less than 1e-4 counts as 1e-4. group_scales also takes larger values and NaN.
template <ScaleFormat format>
MOECOMM_FN GroupScale group_scale(float seen) {
    const float amax = seen < 1e-4f ? 1e-4f : seen, scale = over_448(amax);
    if constexpr (format == ScaleFormat::fp32) {
        return {__fmul_rn(reciprocal(amax), 448.0f), __float_as_uint(scale)};  // `up` has the bits of torch's 448.0 / amax
    } else {
        const u32 bits = __float_as_uint(scale);  // rounded up to the next power of two; 255 stands for infinity and NaN
        const u32 exponent = min((bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u), 255u);
        const u32 up = exponent < 254 ? (254 - exponent) << 23 : exponent == 254 ? 1u << 22 : 0;
        return {__uint_as_float(up), exponent};
    }
}
template <ScaleFormat format, i32 n>
MOECOMM_FN void group_scales(const float (&seen)[n], GroupScale (&scale)[n]) {
    bool huge = false;
#pragma unroll
    for (i32 i = 0; i < n; ++i) {
        scale[i] = group_scale<format>(seen[i]);
        huge |= !(seen[i] < 0x1p126f);
    }
    if (format == ScaleFormat::fp32 && huge) {  // `up` may be subnormal or 0, and any NaN is the one of the specification
#pragma unroll
        for (i32 i = 0; i < n; ++i) {
            if (!(seen[i] < 0x1p126f)) scale[i].up = __fmul_rn(__fdiv_rn(1.0f, seen[i]), 448.0f);
            if (seen[i] != seen[i]) scale[i].bits = 0x7fc00000u;
        }
    }
}

// Cast four columns of a group to int8: each divided by the group's scale, then rounded to nearest even; csrc/host/rows.cpp has the same
// bits. `reciprocal` is 1 / scale. Two corrections make the product with it the quotient, as in __fdiv_rn: the scale is 2^-41 or more, and
// the errors that are left where a product underflows round to 0. A scale that is not finite makes values of 0.
MOECOMM_FN u32 narrow_int8_group(const float* columns, float scale, float reciprocal) {
    u32 word = 0;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        float quotient = __fmul_rn(columns[i], reciprocal);
#pragma unroll
        for (i32 times = 0; times < 2; ++times) quotient = __fmaf_rn(__fmaf_rn(-quotient, scale, columns[i]), reciprocal, quotient);
        word |= byte_of(__float_as_uint(__fadd_rn(quotient, 0x1.8p23f)), 0) << 8 * i;
    }
    return scale < __uint_as_float(0x7f800000u) ? word : 0;
}
// Scale of a group of int8 values, from its maximum magnitude. Any NaN becomes the one of the specification.
MOECOMM_FN float int8_group_scale(float amax) {
    const float scale = __fdiv_rn(amax < 1e-10f ? 1e-10f : amax, 127.0f);
    return scale == scale ? scale : __uint_as_float(0x7fc00000u);
}

}  // namespace moecomm
