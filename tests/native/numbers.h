// The casts again, the slow way: by looking for the nearest value.  Nothing is shared with the executor.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "protocol/args.h"

namespace moecomm::test {

inline i32 size_of(Type type) { return type == Type::fp32 ? 4 : type == Type::e4m3 ? 1 : 2; }

inline float bf16_value(u16 v) {
    const u32 bits = static_cast<u32>(v) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof(f));
    return f;
}
// The neighbour of `f` among the bf16 values, the even one of two equally near.
inline u16 bf16_nearest(float f) {
    if (std::isnan(f)) return 0x7fff;
    u32 bits;
    std::memcpy(&bits, &f, sizeof(bits));
    const u16 low = static_cast<u16>(bits >> 16);
    if (std::isinf(f)) return low;
    const u16 high = static_cast<u16>(low + 1);
    // Beyond the largest value lies 2^128, whose place infinity takes.
    const double above = std::isinf(bf16_value(high)) ? std::copysign(std::ldexp(1.0, 128), f) : bf16_value(high);
    const double to_low = std::fabs(static_cast<double>(f) - bf16_value(low));
    const double to_high = std::fabs(above - static_cast<double>(f));
    if (to_low != to_high) return to_low < to_high ? low : high;
    return low % 2 == 0 ? low : high;
}

inline float fp16_value(u16 v) {
    _Float16 half;
    std::memcpy(&half, &v, sizeof(v));
    return static_cast<float>(half);
}
inline u16 fp16_nearest(float f) {
    if (std::isnan(f)) return 0x7fff;
    const _Float16 half = static_cast<_Float16>(f);
    u16 v;
    std::memcpy(&v, &half, sizeof(v));
    return v;
}

// The finite e4m3 values of one sign, by code.
inline const std::array<double, 127>& e4m3_values() {
    static const std::array<double, 127> values = [] {
        std::array<double, 127> v{};
        for (i32 code = 0; code < 127; ++code) v[code] = code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10);
        return v;
    }();
    return values;
}
inline u8 e4m3_nearest(float f) {
    const u8 sign = std::signbit(f) ? 0x80 : 0;
    const double magnitude = std::fabs(static_cast<double>(f));
    if (std::isnan(f) || magnitude > 464.0) return 0x7f;  // one NaN; 464 is half way to 480, which is no value
    const auto& values = e4m3_values();
    const auto above = std::lower_bound(values.begin(), values.end(), magnitude);
    if (above == values.begin()) return sign;
    i32 code = static_cast<i32>(above - values.begin());
    const double to_high = code < 127 ? values[code] - magnitude : 480.0 - magnitude, to_low = magnitude - values[code - 1];
    if (to_low < to_high || (to_low == to_high && code % 2 == 1)) --code;
    return sign | static_cast<u8>(code);
}

// The exponent, as in fp32, of the smallest power of two that is not below `f`; 255 for infinity and NaN.
inline u8 ue8m0_above(float f) {
    i32 code = 0;
    while (code < 255 && !(std::ldexp(1.0, code - 127) >= f)) ++code;
    return static_cast<u8>(code);
}

inline float value_at(const u8* row, Type type, i64 i) {
    if (type == Type::fp32) {
        float f;
        std::memcpy(&f, row + 4 * i, 4);
        return f;
    }
    u16 v;
    std::memcpy(&v, row + 2 * i, 2);
    return type == Type::bf16 ? bf16_value(v) : fp16_value(v);
}
inline void store_nearest(u8* row, Type type, i64 i, float f) {
    if (type == Type::fp32) {
        std::memcpy(row + 4 * i, &f, 4);
    } else if (type == Type::e4m3) {
        row[i] = e4m3_nearest(f);
    } else {
        const u16 v = type == Type::bf16 ? bf16_nearest(f) : fp16_nearest(f);
        std::memcpy(row + 2 * i, &v, 2);
    }
}

}  // namespace moecomm::test
