#include "weight_casts.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "casts.h"
#include "clones.h"

namespace moecomm::host {

namespace {

constexpr float kLargest = std::numeric_limits<float>::max();
constexpr u32 kInfinity = 0x7f800000u, kNan = 0x7fc00000u;

template <class Kind>
MOECOMM_INLINE void widen_loop(float* __restrict wide, const typename Kind::Stored* __restrict row, i64 n) {
    for (i64 i = 0; i < n; ++i) wide[i] = Kind::load(row[i]);
}
MOECOMM_CLONES void widen_bf16(float* wide, const u8* row, i64 n) { widen_loop<Bf16>(wide, reinterpret_cast<const u16*>(row), n); }
MOECOMM_CLONES void widen_fp16(float* wide, const u8* row, i64 n) { widen_loop<Fp16>(wide, reinterpret_cast<const u16*>(row), n); }
void widen(float* wide, const u8* row, Type type, i64 n) {
    if (type == Type::bf16) return widen_bf16(wide, row, n);
    if (type == Type::fp16) return widen_fp16(wide, row, n);
    std::memcpy(wide, row, n * sizeof(float));
}
i64 bytes_of_row(Type type, i64 columns) { return columns * (type == Type::fp32 ? 4 : 2); }

// The bits of the largest magnitude: they compare as integers, and a NaN is the largest of all.
MOECOMM_INLINE u32 largest_of(const float* __restrict x, i64 n) {
    u32 largest = 0;
    for (i64 i = 0; i < n; ++i) {
        const u32 magnitude = bits_of(x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}
MOECOMM_INLINE float one_nan(float value) { return value == value ? value : float_of(kNan); }

// Magnitudes are compared as integers: compilers vectorize no choice between floats, whose comparison may trap.
MOECOMM_INLINE u8 saturated_e4m3(float f) {
    const u32 bits = bits_of(f), magnitude = bits & 0x7fffffffu;
    const u32 most = magnitude > kInfinity ? kNan : 0x43e00000u;  // 448
    return round_e4m3(float_of((magnitude < most ? magnitude : most) | (bits & 0x80000000u)));
}
MOECOMM_INLINE u8 saturated_int8(float f) {
    const u32 bits = bits_of(f), magnitude = bits & 0x7fffffffu;
    const u32 most = magnitude > kInfinity ? 0 : 0x42fe0000u + (bits >> 31 << 17);  // 127; of negative values 128
    return round_int8(float_of((magnitude < most ? magnitude : most) | (bits & 0x80000000u)));
}
MOECOMM_INLINE u8 e2m1(float f) {
    const u32 bits = bits_of(f), size = bits & 0x7fffffffu;
    // Codes whose range begins above `size`: a difference below 0 has the sign bit.  A tie goes to the even code.
    constexpr u32 kBegins[] = {0x3e800001u, 0x3f400000u, 0x3fa00001u, 0x3fe00000u, 0x40200001u, 0x40600000u, 0x40a00001u};
    u32 code = 7;
    for (const u32 begin : kBegins) code -= (size - begin) >> 31;
    const u32 sign = size > kInfinity ? 0 : bits >> 28 & 8u;
    return static_cast<u8>(code | sign);
}

// One row with one scale.
MOECOMM_CLONES void row_of_e4m3(u8* __restrict out, float* scale, const float* __restrict x, i64 n) {
    const float least = static_cast<float>(1.0 / (448 * 512)), exact = float_of(largest_of(x, n)) / 448.0f;
    const float divisor = exact < least ? least : exact;
    for (i64 i = 0; i < n; ++i) out[i] = saturated_e4m3(x[i] / divisor);
    *scale = one_nan(divisor);
}
MOECOMM_CLONES void row_of_int8(u8* __restrict out, float* scale, const float* __restrict x, i64 n) {
    const float amax = float_of(largest_of(x, n)), up = 127.0f / amax;
    for (i64 i = 0; i < n; ++i) out[i] = saturated_int8(x[i] * up);
    *scale = one_nan(amax / 127.0f);
}
// Groups of 128, of which the last may be smaller.
MOECOMM_CLONES void groups_of_int8(u8* __restrict out, float* __restrict scales, const float* __restrict x, i64 n) {
    for (i64 at = 0, group = 0; at < n; at += kQuantGroup, ++group) {
        const i64 end = std::min<i64>(n, at + kQuantGroup);
        const float amax = float_of(largest_of(x + at, end - at)), divisor = (amax < 1e-10f ? 1e-10f : amax) / 127.0f;
        for (i64 i = at; i < end; ++i) out[i] = saturated_int8(x[i] / divisor);
        scales[group] = one_nan(divisor);
    }
}
// The exponent of the power of two above, and the reciprocal of that power.
struct PowerOfTwo {
    u8 exponent;
    float up;
};
MOECOMM_INLINE PowerOfTwo power_above(float least) {
    const u32 bits = bits_of(least), exponent = bits >> 23, fraction = bits & 0x7fffffu;
    if (bits >= kInfinity) return bits > kInfinity ? PowerOfTwo{255, float_of(kNan)} : PowerOfTwo{254, 0x1p-127f};
    const u32 found = exponent + (fraction > (exponent == 0 ? 0x400000u : 0u));  // 0 stands for 2^-127, 1 for 2^-126
    return {static_cast<u8>(found), 1.0f / (found == 0 ? 0x1p-127f : float_of(found << 23))};
}
// Scale the groups of a row in place, and store their scales; `x` has zeros up to whole groups.  Loops over whole rows follow, because
// compilers vectorize those.
template <i64 group>
MOECOMM_INLINE void scale_by(float* __restrict x, float up) {
    for (i64 i = 0; i < group; ++i) x[i] = x[i] * up;
}
MOECOMM_CLONES void scale_mx(float* __restrict x, u8* __restrict scales, float largest, i64 n) {
    constexpr i64 group = 32;
    for (i64 at = 0; at < n; at += group) {
        const PowerOfTwo scale = power_above(float_of(largest_of(x + at, group)) / largest);
        scale_by<group>(x + at, scale.up);
        scales[at / group] = scale.exponent;
    }
}
MOECOMM_CLONES void scale_nvfp4(float* __restrict x, u8* __restrict scales, float global_scale, i64 n) {
    constexpr i64 group = 16;
    const float of_scale = global_scale * (1.0f / 6.0f), reciprocal = 1.0f / global_scale;
    for (i64 at = 0; at < n; at += group) {
        const u8 scale = saturated_e4m3(float_of(largest_of(x + at, group)) * of_scale);
        const float exact = 1.0f / (load_e4m3(scale) * reciprocal);
        scale_by<group>(x + at, exact > kLargest ? kLargest : exact);
        scales[at / group] = scale;
    }
}
MOECOMM_CLONES void to_e4m3(u8* __restrict out, const float* __restrict x, i64 n) {
    for (i64 i = 0; i < n; ++i) out[i] = saturated_e4m3(x[i]);
}
MOECOMM_CLONES void to_e2m1(u8* __restrict codes, const float* __restrict x, i64 n) {
    for (i64 i = 0; i < n; ++i) codes[i] = e2m1(x[i]);
}
MOECOMM_CLONES void pack(u8* __restrict out, const u16* __restrict codes, i64 pairs) {
    for (i64 i = 0; i < pairs; ++i) out[i] = static_cast<u8>((codes[i] & 0xfu) | codes[i] >> 4);
}

MOECOMM_CLONES void largest_of_groups(u32* __restrict largest, const float* __restrict x, i64 n) {
    for (i64 at = 0, group = 0; at < n; at += kQuantGroup, ++group)
        largest[group] = std::max(largest[group], largest_of(x + at, std::min<i64>(kQuantGroup, n - at)));
}
// A NaN keeps its sign, as by torch's cast.
MOECOMM_CLONES void row_of_blocks(u8* __restrict out, const float* __restrict ups, const float* __restrict x, i64 n) {
    for (i64 at = 0, group = 0; at < n; at += kQuantGroup, ++group) {
        const float up = ups[group];
        for (i64 i = at; i < std::min<i64>(n, at + kQuantGroup); ++i) {
            const float value = x[i] * up;
            out[i] = static_cast<u8>(round_e4m3(value) | (bits_of(value) >> 24 & 0x80u));
        }
    }
}

}  // namespace

void cast_rows(u8* values, u8* scales, RowFormat format, const u8* rows, Type type, i64 count, i64 columns, float global_scale) {
    constexpr i64 most = 32;  // of the groups that are padded
    std::vector<float> wide((columns + most - 1) / most * most);
    std::vector<u16> codes(columns / 2 + 1);  // of two columns each, the even one in the low half
    auto* const floats = reinterpret_cast<float*>(scales);
    const bool four_bits = format == RowFormat::nvfp4 || format == RowFormat::mxfp4;
    for (i64 row = 0; row < count; ++row) {
        widen(wide.data(), rows + row * bytes_of_row(type, columns), type, columns);
        std::fill(wide.begin() + columns, wide.end(), 0.0f);  // which may have been scaled
        u8* const out = values + row * (four_bits ? columns / 2 : columns);
        const auto scales_of = [&](i64 group) { return row * ((columns + group - 1) / group); };
        switch (format) {
            case RowFormat::fp8_token:
                row_of_e4m3(out, floats + row, wide.data(), columns);
                break;
            case RowFormat::int8_token:
                row_of_int8(out, floats + row, wide.data(), columns);
                break;
            case RowFormat::int8_group:
                groups_of_int8(out, floats + scales_of(kQuantGroup), wide.data(), columns);
                break;
            case RowFormat::mxfp8:
                scale_mx(wide.data(), scales + scales_of(32), 448.0f, columns);
                to_e4m3(out, wide.data(), columns);
                break;
            case RowFormat::nvfp4:
                scale_nvfp4(wide.data(), scales + scales_of(16), global_scale, columns);
                break;
            case RowFormat::mxfp4:
                scale_mx(wide.data(), scales + scales_of(32), 6.0f, columns);
                break;
        }
        if (four_bits) {
            to_e2m1(reinterpret_cast<u8*>(codes.data()), wide.data(), columns);
            pack(out, codes.data(), columns / 2);
        }
    }
}

void cast_blocks(u8* values, float* scales, const u8* rows, Type type, i64 count, i64 columns) {
    const i64 across = (columns + kQuantGroup - 1) / kQuantGroup, row_bytes = bytes_of_row(type, columns);
    std::vector<float> wide(columns), ups(across);
    std::vector<u32> largest(across);
    for (i64 first = 0; first < count; first += kQuantGroup, scales += across) {
        const i64 end = std::min<i64>(count, first + kQuantGroup);
        std::fill(largest.begin(), largest.end(), 0);
        for (i64 row = first; row < end; ++row) {
            widen(wide.data(), rows + row * row_bytes, type, columns);
            largest_of_groups(largest.data(), wide.data(), columns);
        }
        for (i64 group = 0; group < across; ++group) {
            const float seen = float_of(largest[group]), amax = seen < 1e-4f ? 1e-4f : seen;
            scales[group] = amax / 448.0f;
            ups[group] = (1.0f / amax) * 448.0f;
        }
        for (i64 row = first; row < end; ++row) {
            widen(wide.data(), rows + row * row_bytes, type, columns);
            row_of_blocks(values + row * columns, ups.data(), wide.data(), columns);
        }
    }
}

}  // namespace moecomm::host
