// Casts of rows to formats of payloads. moecomm/base/formats.py specifies the arithmetic, and has the same bits: every operation below is
// one of fp32, rounded to nearest even.
#pragma once
#include "../device/cast.cuh"
#include "row_pass.cuh"

namespace moecomm {

// Those of the specification that kernels cast to, by its names.
enum class Format : i32 { fp8_token, fp8_tensor, int8_token, int8_group, mxfp8, nvfp4, mxfp4 };

// Columns that share a scale; 0: all of a row, or of all rows.
MOECOMM_BOTH constexpr i32 group_of(Format format) {
    switch (format) {
        case Format::int8_group:
            return 128;
        case Format::nvfp4:
            return 16;
        case Format::mxfp8:
        case Format::mxfp4:
            return 32;
        default:
            return 0;
    }
}
MOECOMM_BOTH constexpr bool is_scaled_by_row(Format format) { return format == Format::fp8_token || format == Format::int8_token; }
MOECOMM_BOTH constexpr bool is_int8(Format format) { return format == Format::int8_token || format == Format::int8_group; }
MOECOMM_BOTH constexpr bool is_e2m1(Format format) { return format == Format::nvfp4 || format == Format::mxfp4; }
MOECOMM_BOTH constexpr i32 bits_of(Format format) { return is_e2m1(format) ? 4 : 8; }
MOECOMM_BOTH constexpr float largest_of(Format format) { return is_int8(format) ? 127.0f : is_e2m1(format) ? 6.0f : 448.0f; }

constexpr i32 kPieceColumns = 16;  // columns that a thread casts at once
constexpr i32 kPiecesKept = 2;     // pieces of a row that a thread keeps in registers while the block finds the row's scale
constexpr u32 kNanBits = 0x7fc00000u, kInfinityBits = 0x7f800000u;

// A piece of a row, as it is in memory.
template <Type type>
struct Piece {
    u32 words[kPieceColumns * bytes_of(type) / 4];
};

// Return a piece of the row at `row`, with zeros where the row has no more columns. `aligned`: rows are whole pieces, at multiples of 16
// bytes.
template <Type type, bool aligned>
MOECOMM_FN Piece<type> load_piece(const u8* row, i32 column, i32 columns) {
    constexpr i32 words = sizeof(Piece<type>) / 4;
    Piece<type> piece;
    if (aligned && column < columns) {
        const uint4* const from = reinterpret_cast<const uint4*>(row + static_cast<i64>(column) * bytes_of(type));
#pragma unroll
        for (i32 i = 0; i < words; i += 4) {
            const uint4 four = from[i / 4];
            piece.words[i] = four.x, piece.words[i + 1] = four.y, piece.words[i + 2] = four.z, piece.words[i + 3] = four.w;
        }
        return piece;
    }
#pragma unroll
    for (i32 i = 0; i < words; ++i) piece.words[i] = 0;
    if constexpr (!aligned) {
#pragma unroll
        for (i32 i = 0; i < kPieceColumns; ++i) {
            if (column + i >= columns) continue;
            if constexpr (type == Type::fp32) {
                piece.words[i] = reinterpret_cast<const u32*>(row)[column + i];
            } else {
                piece.words[i / 2] |= static_cast<u32>(reinterpret_cast<const u16*>(row)[column + i]) << 16 * (i % 2);
            }
        }
    }
    return piece;
}

// Store a piece's values, 8 or 16 bytes. Rows of 4-bit values have an even number of columns.
template <Format format, bool aligned>
MOECOMM_FN void store_piece(u8* row, i32 column, i32 columns, const u32 (&words)[kPieceColumns * bits_of(format) / 32]) {
    if (column >= columns) return;
    u8* const to = row + static_cast<i64>(column) * bits_of(format) / 8;
    if constexpr (!aligned) {
        const i32 bytes = min(kPieceColumns, columns - column) * bits_of(format) / 8;
#pragma unroll
        for (i32 i = 0; i < kPieceColumns * bits_of(format) / 8; ++i)
            if (i < bytes) to[i] = static_cast<u8>(words[i / 4] >> 8 * (i % 4));
    } else if constexpr (is_e2m1(format)) {
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

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

// Return the scale of columns with the maximum magnitude `amax`; `given`: the global scale.
template <Format format>
MOECOMM_FN ValueScale value_scale(float amax, float given) {
    constexpr float largest = largest_of(format);
    if constexpr (format == Format::fp8_tensor) {
        return {__fdiv_rn(1.0f, given), 0};
    } else if constexpr (format == Format::nvfp4) {
        const u32 narrow = narrow_e4m3(__fmul_rn(amax, __fmul_rn(given, 1.0f / largest)), 0.0f) & 0xffu;
        const u32 size = narrow & 0x7fu, bits = size == 0x7fu ? size : narrow;
        const u32 sign = (bits & 0x80u) << 24;
        const float scale = size == 0x7fu ? __uint_as_float(kNanBits)  // e4m3 is fp32 without its low bits and with another bias
                                          : __fmul_rn(__uint_as_float(sign | size << 20), 0x1p120f);
        const float up = __fdiv_rn(1.0f, __fmul_rn(scale, __fdiv_rn(1.0f, given)));
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

// Round to e2m1, nearest even, at most 6, in integer arithmetic: Hopper has no instruction for it.
MOECOMM_FN u32 narrow_e2m1(float value) {
    const u32 bits = __float_as_uint(value), size = bits & 0x7fffffffu;
    const u32 normal = (size - (126u << 23) + 0x1fffffu + ((size >> 22) & 1u)) >> 22;
    const u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(size), 0x1p22f)) - __float_as_uint(0x1p22f);  // the ulp of 2^22 is 0.5
    return min(size < (127u << 23) ? subnormal : normal, 7u) | (bits >> 28 & 8u);
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

// Cast a piece and store it.
template <Type type, Format format, bool aligned>
MOECOMM_FN void cast_piece(const Piece<type>& piece, const ValueScale& scale, u8* row, i32 column, i32 columns) {
    constexpr i32 words = kPieceColumns * bits_of(format) / 32, in_word = 32 / bits_of(format);
    float values[kPieceColumns];
    scale_values<type, format>(piece, scale.by, values);
    u32 out[words];
#pragma unroll
    for (i32 i = 0; i < words; ++i) {
        const float* const of_word = values + i * in_word;
        out[i] = 0;
        if constexpr (is_e2m1(format)) {
#pragma unroll
            for (i32 k = 0; k < in_word; ++k) out[i] |= narrow_e2m1(of_word[k]) << 4 * k;
            if (scale.by != scale.by) out[i] = 0x77777777u;  // NaN counts as 6
        } else if constexpr (is_int8(format)) {
#pragma unroll
            for (i32 k = 0; k < in_word; ++k) out[i] |= narrow_int8(of_word[k]) << 8 * k;
        } else {
            const u32 four = narrow_e4m3(of_word[0], of_word[1]) | narrow_e4m3(of_word[2], of_word[3]) << 16;
            out[i] = four & ~(((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u);  // NaN loses its sign
        }
    }
    store_piece<format, aligned>(row, column, columns, out);
}

// Called by all threads of the grid; a warp casts up to 512 columns of a row at a time, which need nothing of other columns.
template <Type type, Format format, bool aligned>
MOECOMM_FN void quantize_groups(const QuantizeArgs& a, float given) {
    constexpr i32 group = group_of(format), lanes = group == 0 ? 1 : group / kPieceColumns;
    const i32 segments = ceil_div(a.hidden, kWarp * kPieceColumns);
    const i64 x_bytes = static_cast<i64>(a.hidden) * bytes_of(type), value_bytes = static_cast<i64>(a.hidden) * bits_of(format) / 8;
    each_row(a.count * segments, [&](i32 segment) {
        const i32 row = segment / segments, column = (segment % segments * kWarp + lane_id()) * kPieceColumns;
        const Piece<type> piece = load_piece<type, aligned>(reinterpret_cast<const u8*>(a.x) + row * x_bytes, column, a.hidden);
        float amax = 0.0f;
        if constexpr (group != 0) amax = largest_in_group<type, lanes>(largest_magnitudes<type>(piece));
        const ValueScale scale = value_scale<format>(amax, given);
        cast_piece<type, format, aligned>(piece, scale, reinterpret_cast<u8*>(a.values) + row * value_bytes, column, a.hidden);
        if constexpr (group != 0) {
            if (lane_id() % lanes != 0 || column >= a.hidden) return;
            const i64 at = static_cast<i64>(row) * ceil_div(a.hidden, group) + column / group;
            if constexpr (format == Format::int8_group) {
                reinterpret_cast<u32*>(a.scales)[at] = scale.bits;
            } else {
                reinterpret_cast<u8*>(a.scales)[at] = static_cast<u8>(scale.bits);
            }
        }
    });
}

// Called by all threads of the grid; a block casts a row at a time. What of it does not fit in registers is read twice.
template <Type type, Format format, bool aligned>
MOECOMM_FN void quantize_whole_rows(const QuantizeArgs& a) {
    __shared__ u32 of_warps[2][kPassWarps];
    const i64 x_bytes = static_cast<i64>(a.hidden) * bytes_of(type);
    constexpr i32 stride = kPassThreads * kPieceColumns;
    const i32 first = threadIdx.x * kPieceColumns;
    i32 turn = 0;  // of a block's rows; the two halves of of_warps make one barrier a row enough
    for (i32 row = blockIdx.x; row < a.count; row += gridDim.x, turn ^= 1) {
        const u8* const from = reinterpret_cast<const u8*>(a.x) + row * x_bytes;
        u8* const to = reinterpret_cast<u8*>(a.values) + static_cast<i64>(row) * a.hidden;
        Piece<type> kept[kPiecesKept];
        u32 seen = 0;
#pragma unroll
        for (i32 i = 0; i < kPiecesKept; ++i) kept[i] = load_piece<type, aligned>(from, first + i * stride, a.hidden);
#pragma unroll
        for (i32 i = 0; i < kPiecesKept; ++i) seen = larger<type>(seen, largest_magnitudes<type>(kept[i]));
        for (i32 column = first + kPiecesKept * stride; column < a.hidden; column += stride)
            seen = larger<type>(seen, largest_magnitudes<type>(load_piece<type, aligned>(from, column, a.hidden)));
        const float of_warp = largest_in_group<type, kWarp>(seen);
        if (lane_id() == 0) of_warps[turn][warp_id()] = __float_as_uint(of_warp);
        __syncthreads();
        u32 amax = 0;
#pragma unroll
        for (i32 i = 0; i < kPassWarps; ++i) amax = max(amax, of_warps[turn][i]);  // bits of magnitudes are ordered as they are
        const ValueScale scale = value_scale<format>(__uint_as_float(amax), 0.0f);
#pragma unroll
        for (i32 i = 0; i < kPiecesKept; ++i) cast_piece<type, format, aligned>(kept[i], scale, to, first + i * stride, a.hidden);
        for (i32 column = first + kPiecesKept * stride; column < a.hidden; column += stride)
            cast_piece<type, format, aligned>(load_piece<type, aligned>(from, column, a.hidden), scale, to, column, a.hidden);
        if (threadIdx.x == 0) reinterpret_cast<u32*>(a.scales)[row] = scale.bits;
    }
}

// `aligned`: rows of x and of values begin at multiples of 16 bytes, and have a multiple of 16 columns.
template <Type type, Format format, bool aligned>
MOECOMM_FN void quantize_rows(const QuantizeArgs& a) {
    if constexpr (is_scaled_by_row(format)) {
        quantize_whole_rows<type, format, aligned>(a);
    } else {
        const float given = a.global_scale != 0 ? *reinterpret_cast<const float*>(a.global_scale) : __int_as_float(a.global_bits);
        quantize_groups<type, format, aligned>(a, given);
    }
}

}  // namespace moecomm
