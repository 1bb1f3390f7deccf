// Branch-free casts between fp32 and the narrow types, so that compilers vectorize loops over them.
#pragma once
#include <cstring>

#include "../protocol/compiler.h"

namespace moecomm::host {

#define MOECOMM_INLINE __attribute__((always_inline)) inline

MOECOMM_INLINE u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}
MOECOMM_INLINE float float_of(u32 bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

struct Bf16 {
    using Stored = u16;
    static MOECOMM_INLINE float load(u16 v) { return float_of(static_cast<u32>(v) << 16); }
    static MOECOMM_INLINE u16 round(float f) {
        const u32 bits = bits_of(f);
        const u32 nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : nearest);
    }
};

struct Fp16 {
    using Stored = u16;
    static MOECOMM_INLINE float load(u16 v) {
        // The shifted bits are the value times 2^-112, fp16 subnormals included.  Infinities and NaNs get the fp32 exponent 255.
        const u32 magnitude = (v & 0x7fffu) << 13;
        const u32 finite = bits_of(float_of(magnitude) * 0x1p112f);
        const u32 special = magnitude | 0x7f800000u;
        return float_of((static_cast<u32>(v & 0x8000u) << 16) | (magnitude >= (0x7c00u << 13) ? special : finite));
    }
    static MOECOMM_INLINE u16 round(float f) {
        const u32 bits = bits_of(f);
        const u32 magnitude = bits & 0x7fffffffu;
        // Normal: rebias the exponent from 127 to 15 and round at bit 13.  Below 2^-14, adding 0.5 rounds: the ulp of 0.5 is 2^-24.
        const u32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
        u32 half = magnitude < (113u << 23) ? subnormal : normal;
        half = magnitude >= (143u << 23) ? 0x7c00u : half;  // 2^16 and above; smaller values that round up overflow to 0x7c00 by themselves
        return static_cast<u16>(magnitude > 0x7f800000u ? 0x7fffu : half | ((bits >> 16) & 0x8000u));
    }
};

struct Fp32 {
    using Stored = float;
    static MOECOMM_INLINE float load(float v) { return v; }
    static MOECOMM_INLINE float round(float f) { return f; }
};

// e4m3fn: no infinities; the largest value is 448. NaN and larger rounded values become the NaN 0x7f, whatever their sign is: infinity
// times 0 has one that differs between processors.
MOECOMM_INLINE u8 round_e4m3(float f) {
    const u32 bits = bits_of(f);
    const u32 magnitude = bits & 0x7fffffffu;
    const u32 normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    const u32 subnormal = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f);  // the ulp of 2^14 is 2^-9
    u32 narrow = magnitude < (121u << 23) ? subnormal : normal;
    const bool is_nan = magnitude >= (135u << 23) + (7u << 20) || narrow == 0x7fu;  // 480 and above and NaN; above 464
    return static_cast<u8>(is_nan ? 0x7fu : narrow | ((bits >> 24) & 0x80u));
}

MOECOMM_INLINE float load_e4m3(u8 v) {
    // The shifted bits are the value times 2^-120, subnormals included.
    const float finite = float_of(static_cast<u32>(v & 0x7fu) << 20) * 0x1p120f;
    return float_of((static_cast<u32>(v & 0x80u) << 24) | ((v & 0x7fu) == 0x7fu ? 0x7fffffffu : bits_of(finite)));
}

// Rounded to nearest even, of at most 2^22 in magnitude: adding 1.5 * 2^23 leaves the integer in the lowest bits.
MOECOMM_INLINE u8 round_int8(float f) { return static_cast<u8>(bits_of(f + 0x1.8p23f)); }

// ue8m0 is the exponent of fp32 alone.  Round a positive normal number up to a power of two.  Infinity and NaN give 255, which is NaN in
// ue8m0 and which load_ue8m0() turns into infinity.
MOECOMM_INLINE u8 round_up_ue8m0(float f) {
    const u32 exponent = (bits_of(f) + 0x7fffffu) >> 23;
    return static_cast<u8>(exponent > 0xffu ? 0xffu : exponent);
}
MOECOMM_INLINE float load_ue8m0(u8 v) { return float_of(static_cast<u32>(v) << 23); }

}  // namespace moecomm::host
