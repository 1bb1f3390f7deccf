#include "rows.h"

#include <algorithm>

#include "casts.h"
#include "clones.h"

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#define MOECOMM_STREAMS 1
#else
#define MOECOMM_STREAMS 0
#endif

namespace moecomm::host {

namespace {

// Add N rows in one pass, so that sums stay in registers; start from 0 if `Fresh`.
template <class Kind, i32 N, bool Fresh>
MOECOMM_INLINE void add_n(float* __restrict sum, const u8* const* rows, const float* factors, i64 first, i64 n) {
    using Row = const typename Kind::Stored* __restrict;
    constexpr i32 second = N > 1 ? 1 : 0, third = N > 2 ? 2 : 0, fourth = N > 3 ? 3 : 0;
    Row a = reinterpret_cast<Row>(rows[0]) + first;
    Row b = reinterpret_cast<Row>(rows[second]) + first;
    Row c = reinterpret_cast<Row>(rows[third]) + first;
    Row d = reinterpret_cast<Row>(rows[fourth]) + first;
    const float fa = factors[0], fb = factors[second], fc = factors[third], fd = factors[fourth];
    for (i64 i = 0; i < n; ++i) {
        float s = Fresh ? 0.0f : sum[i];
        s = s + fa * Kind::load(a[i]);
        if (N > 1) s = s + fb * Kind::load(b[i]);
        if (N > 2) s = s + fc * Kind::load(c[i]);
        if (N > 3) s = s + fd * Kind::load(d[i]);
        sum[i] = s;
    }
}
template <class Kind, bool Fresh>
MOECOMM_INLINE void add_few(float* sum, const u8* const* rows, const float* factors, i32 count, i64 first, i64 n) {
    if (count >= 4) return add_n<Kind, 4, Fresh>(sum, rows, factors, first, n);
    if (count == 3) return add_n<Kind, 3, Fresh>(sum, rows, factors, first, n);
    if (count == 2) return add_n<Kind, 2, Fresh>(sum, rows, factors, first, n);
    if (count == 1) return add_n<Kind, 1, Fresh>(sum, rows, factors, first, n);
}
template <class Kind>
MOECOMM_INLINE void add_all(float* sum, bool fresh, const u8* const* rows, const float* factors, i32 count, i64 first, i64 n) {
    if (fresh) {
        add_few<Kind, true>(sum, rows, factors, count, first, n);
        rows += 4, factors += 4, count -= 4;
    }
    for (; count > 0; rows += 4, factors += 4, count -= 4) add_few<Kind, false>(sum, rows, factors, count, first, n);
}
template <class Kind>
MOECOMM_INLINE void widen_loop(float* __restrict wide, const typename Kind::Stored* __restrict row, i64 n) {
    for (i64 i = 0; i < n; ++i) wide[i] = Kind::load(row[i]);
}
template <class Kind>
MOECOMM_INLINE void round_loop(typename Kind::Stored* __restrict row, const float* __restrict sum, i64 n) {
    for (i64 i = 0; i < n; ++i) row[i] = Kind::round(sum[i]);
}

MOECOMM_CLONES void add_bf16(float* sum, bool fresh, const u8* const* rows, const float* factors, i32 count, i64 first, i64 n) {
    add_all<Bf16>(sum, fresh, rows, factors, count, first, n);
}
MOECOMM_CLONES void add_fp16(float* sum, bool fresh, const u8* const* rows, const float* factors, i32 count, i64 first, i64 n) {
    add_all<Fp16>(sum, fresh, rows, factors, count, first, n);
}
MOECOMM_CLONES void add_fp32(float* sum, bool fresh, const u8* const* rows, const float* factors, i32 count, i64 first, i64 n) {
    add_all<Fp32>(sum, fresh, rows, factors, count, first, n);
}
MOECOMM_CLONES void widen_bf16(float* wide, const u16* row, i64 n) { widen_loop<Bf16>(wide, row, n); }
MOECOMM_CLONES void widen_fp16(float* wide, const u16* row, i64 n) { widen_loop<Fp16>(wide, row, n); }
MOECOMM_CLONES void round_bf16(u16* row, const float* sum, i64 n) { round_loop<Bf16>(row, sum, n); }
MOECOMM_CLONES void round_fp16(u16* row, const float* sum, i64 n) { round_loop<Fp16>(row, sum, n); }

// Convert to fp32.  Not by way of a sum, which starts at 0 and would lose the sign of -0.
void widen(float* wide, const u8* row, Type type, i64 n) {
    if (type == Type::bf16) return widen_bf16(wide, reinterpret_cast<const u16*>(row), n);
    if (type == Type::fp16) return widen_fp16(wide, reinterpret_cast<const u16*>(row), n);
    std::memcpy(wide, row, n * sizeof(float));
}

// One group of at most kQuantGroup values, in fp32.
MOECOMM_CLONES void quantize_group(u8* __restrict out, u8* __restrict scale, ScaleFormat format, const float* __restrict values, i64 n) {
    u32 largest = 0;  // magnitudes compare as integers, and a NaN is the largest of all
    for (i64 i = 0; i < n; ++i) {
        const u32 magnitude = bits_of(values[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float seen = float_of(largest > 0x7f800000u ? 0x7fc00000u : largest);  // one NaN for all
    const float amax = seen < 1e-4f ? 1e-4f : seen;
    const float exact = amax / 448.0f;
    const u8 exponent = round_up_ue8m0(exact);
    // fp32: computed as torch does 448.0 / amax.  ue8m0: a power of two has an exact reciprocal.
    const float up = format == ScaleFormat::ue8m0 ? 1.0f / load_ue8m0(exponent) : (1.0f / amax) * 448.0f;
    for (i64 i = 0; i < n; ++i) out[i] = round_e4m3(values[i] * up);
    if (format == ScaleFormat::ue8m0) {
        *scale = exponent;
    } else {
        std::memcpy(scale, &exact, sizeof(exact));
    }
}

// Cast a group to int8: scale = max(max |value|, 1e-10) / 127, out = value / scale. A group that is not finite gets values of 0.
MOECOMM_CLONES void quantize_group_int8(u8* __restrict out, u8* __restrict scale, const float* __restrict values, i64 n) {
    u32 largest = 0;
    for (i64 i = 0; i < n; ++i) {
        const u32 magnitude = bits_of(values[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const bool finite = largest < 0x7f800000u;
    const float amax = float_of(largest);
    const float divisor = largest > 0x7f800000u ? float_of(0x7fc00000u) : (amax < 1e-10f ? 1e-10f : amax) / 127.0f;
    for (i64 i = 0; i < n; ++i) out[i] = finite ? round_int8(values[i] / divisor) : 0;
    std::memcpy(scale, &divisor, sizeof(divisor));
}

MOECOMM_CLONES void add_e4m3(float* __restrict sum, const u8* __restrict row, float scale, i64 n) {
    for (i64 i = 0; i < n; ++i) sum[i] = sum[i] + load_e4m3(row[i]) * scale;
}
MOECOMM_CLONES void add_int8(float* __restrict sum, const u8* __restrict row, float scale, i64 n) {
    for (i64 i = 0; i < n; ++i) sum[i] = sum[i] + static_cast<float>(static_cast<signed char>(row[i])) * scale;
}

}  // namespace

void copy_row(u8* to, const u8* from, i64 bytes, bool past_cache) {
#if MOECOMM_STREAMS
    const i64 work = sizeof(__m128i);
    if (past_cache && bytes % work == 0 && reinterpret_cast<u64>(to) % work == 0) {
        for (i64 i = 0; i < bytes; i += work) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
        }
        return;
    }
#endif
    static_cast<void>(past_cache);
    std::memcpy(to, from, bytes);
}

void order_copied_rows() {
#if MOECOMM_STREAMS
    _mm_sfence();
#endif
}

void sum_rows(float* sum, const Addends& rows, i64 first, i64 n) {
    if (rows.count == 0) std::memset(sum, 0, n * sizeof(float));
    for (i32 i = 0, end; i < rows.count; i = end) {  // runs of one type
        for (end = i + 1; end < rows.count && rows.type[end] == rows.type[i];) ++end;
        const auto add = rows.type[i] == Type::bf16 ? add_bf16 : rows.type[i] == Type::fp16 ? add_fp16 : add_fp32;
        add(sum, i == 0, rows.row + i, rows.factor + i, end - i, first, n);
    }
}

void add_row(float* sum, const u8* row, Type type, float factor, i64 n) {
    const auto add = type == Type::bf16 ? add_bf16 : type == Type::fp16 ? add_fp16 : add_fp32;
    add(sum, false, &row, &factor, 1, 0, n);
}

void round_row(u8* row, const float* sum, Type type, i64 n) {
    if (type == Type::bf16) return round_bf16(reinterpret_cast<u16*>(row), sum, n);
    if (type == Type::fp16) return round_fp16(reinterpret_cast<u16*>(row), sum, n);
    std::memcpy(row, sum, n * sizeof(float));
}

void stage_scaled(u8* staged, Type type, const u8* columns, Type from, i64 hidden, i64 first, i64 n) {
    for (i64 at = 0; at < n; at += kQuantGroup) {
        const i32 column = static_cast<i32>(first + at);
        const i64 count = std::min<i64>(kQuantGroup, n - at);
        u8 *const values = staged + scaled_column_at(column), *const scale = staged + scale_at(column, static_cast<i32>(hidden));
        float wide[kQuantGroup];
        widen(wide, columns + at * bytes_of(from), from, count);
        if (type == Type::int8) {
            quantize_group_int8(values, scale, wide, count);
        } else {
            quantize_group(values, scale, ScaleFormat::fp32, wide, count);
        }
        u8* const end = staged + staged_bytes(type, hidden);
        if (first + at + count == hidden) std::memset(scale + sizeof(float), 0, end - scale - sizeof(float));
    }
}

void stage_columns(u8* staged, const float* sum, Type type, i64 hidden, i64 first, i64 n) {
    if (!has_scales(type)) return round_row(staged + first * bytes_of(type), sum, type, n);
    stage_scaled(staged, type, reinterpret_cast<const u8*>(sum), Type::fp32, hidden, first, n);
}

void add_staged(float* sum, const u8* staged, Type type, float factor, i64 hidden, i64 first, i64 n) {
    if (!has_scales(type)) return add_row(sum, staged + first * bytes_of(type), type, factor, n);
    const auto add = type == Type::int8 ? add_int8 : add_e4m3;
    for (i64 at = 0; at < n; at += kQuantGroup) {
        const i32 column = static_cast<i32>(first + at);
        float scale;
        std::memcpy(&scale, staged + scale_at(column, static_cast<i32>(hidden)), sizeof(scale));
        add(sum + at, staged + scaled_column_at(column), scale, std::min<i64>(kQuantGroup, n - at));
    }
}

void quantize_row(u8* out, u8* scales, ScaleFormat format, const u8* row, Type type, i64 n) {
    const i64 scale_bytes = format == ScaleFormat::ue8m0 ? 1 : sizeof(float);
    for (i64 first = 0; first < n; first += kQuantGroup) {
        const i64 count = n - first < kQuantGroup ? n - first : kQuantGroup;
        float values[kQuantGroup];
        widen(values, row + first * bytes_of(type), type, count);
        quantize_group(out + first, scales + first / kQuantGroup * scale_bytes, format, values, count);
    }
}

}  // namespace moecomm::host
