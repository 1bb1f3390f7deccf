#include "rows.h"

#include "casts.h"

// The same loops for plain, AVX2 and AVX-512 machines, chosen when the library is loaded.  ThreadSanitizer is not up yet at that time.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define MOECOMM_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define MOECOMM_CLONES
#endif

namespace moecomm::host {

namespace {

template <class Kind>
MOECOMM_INLINE void add_scaled_loop(float* __restrict sum, const typename Kind::Stored* __restrict row, i64 n, float factor) {
    for (i64 i = 0; i < n; ++i) sum[i] = sum[i] + factor * Kind::load(row[i]);
}
template <class Kind>
MOECOMM_INLINE void widen_loop(float* __restrict wide, const typename Kind::Stored* __restrict row, i64 n) {
    for (i64 i = 0; i < n; ++i) wide[i] = Kind::load(row[i]);
}
template <class Kind>
MOECOMM_INLINE void round_loop(typename Kind::Stored* __restrict row, const float* __restrict sum, i64 n) {
    for (i64 i = 0; i < n; ++i) row[i] = Kind::round(sum[i]);
}

MOECOMM_CLONES void add_bf16(float* sum, const u16* row, i64 n, float factor) { add_scaled_loop<Bf16>(sum, row, n, factor); }
MOECOMM_CLONES void add_fp16(float* sum, const u16* row, i64 n, float factor) { add_scaled_loop<Fp16>(sum, row, n, factor); }
MOECOMM_CLONES void add_fp32(float* sum, const float* row, i64 n, float factor) { add_scaled_loop<Fp32>(sum, row, n, factor); }
MOECOMM_CLONES void widen_bf16(float* wide, const u16* row, i64 n) { widen_loop<Bf16>(wide, row, n); }
MOECOMM_CLONES void widen_fp16(float* wide, const u16* row, i64 n) { widen_loop<Fp16>(wide, row, n); }
MOECOMM_CLONES void round_bf16(u16* row, const float* sum, i64 n) { round_loop<Bf16>(row, sum, n); }
MOECOMM_CLONES void round_fp16(u16* row, const float* sum, i64 n) { round_loop<Fp16>(row, sum, n); }

// To fp32 as it is: a sum that starts at 0 would lose the sign of -0.
void widen(float* wide, const u8* row, Type type, i64 n) {
    if (type == Type::bf16) return widen_bf16(wide, reinterpret_cast<const u16*>(row), n);
    if (type == Type::fp16) return widen_fp16(wide, reinterpret_cast<const u16*>(row), n);
    std::memcpy(wide, row, n * sizeof(float));
}

// One group of at most kQuantGroup values, in fp32.
MOECOMM_CLONES void quantize_group(u8* __restrict out, float* __restrict scale, const float* __restrict values, i64 n) {
    u32 largest = 0;  // magnitudes compare as integers, and a NaN is the largest of all
    for (i64 i = 0; i < n; ++i) {
        const u32 magnitude = bits_of(values[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float seen = float_of(largest);
    const float amax = seen < 1e-4f ? 1e-4f : seen;
    const float up = (1.0f / amax) * 448.0f;  // what torch makes of 448.0 / amax
    for (i64 i = 0; i < n; ++i) out[i] = round_e4m3(values[i] * up);
    *scale = amax / 448.0f;
}

}  // namespace

void add_scaled(float* sum, const u8* row, Type type, i64 n, float factor) {
    if (type == Type::bf16) return add_bf16(sum, reinterpret_cast<const u16*>(row), n, factor);
    if (type == Type::fp16) return add_fp16(sum, reinterpret_cast<const u16*>(row), n, factor);
    add_fp32(sum, reinterpret_cast<const float*>(row), n, factor);
}

void round_row(u8* row, const float* sum, Type type, i64 n) {
    if (type == Type::bf16) return round_bf16(reinterpret_cast<u16*>(row), sum, n);
    if (type == Type::fp16) return round_fp16(reinterpret_cast<u16*>(row), sum, n);
    std::memcpy(row, sum, n * sizeof(float));
}

void quantize_row(u8* out, float* scales, const u8* row, Type type, i64 n) {
    for (i64 first = 0; first < n; first += kQuantGroup) {
        const i64 count = n - first < kQuantGroup ? n - first : kQuantGroup;
        float values[kQuantGroup];
        widen(values, row + first * bytes_of(type), type, count);
        quantize_group(out + first, &scales[first / kQuantGroup], values, count);
    }
}

}  // namespace moecomm::host
