// Casts of rows to formats of payloads, as a pass over them.
#pragma once
#include "../device/format_casts.cuh"
#include "row_pass.cuh"

namespace moecomm {

constexpr i32 kPiecesKept = 2;  // pieces of a row that a thread keeps in registers while the block finds the row's scale

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

// Cast a piece and store it.
template <Type type, Format format, bool aligned>
MOECOMM_FN void cast_piece(const Piece<type>& piece, const ValueScale& scale, u8* row, i32 column, i32 columns) {
    u32 out[kPieceColumns * bits_of(format) / 32];
    narrow_piece<type, format>(piece, scale, out);
    store_piece<format, aligned>(row, column, columns, out);
}

// Called by all threads of the grid; a warp casts up to 512 columns of a row at a time, which need nothing of other columns.
template <Type type, Format format, bool aligned>
MOECOMM_FN void quantize_groups(const QuantizeArgs& a, const GlobalScale& given) {
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
            store_scale<format>(reinterpret_cast<void*>(a.scales), static_cast<i64>(row) * ceil_div(a.hidden, group) + column / group,
                                scale);
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
        const ValueScale scale = value_scale<format>(__uint_as_float(amax), {});
#pragma unroll
        for (i32 i = 0; i < kPiecesKept; ++i) cast_piece<type, format, aligned>(kept[i], scale, to, first + i * stride, a.hidden);
        for (i32 column = first + kPiecesKept * stride; column < a.hidden; column += stride)
            cast_piece<type, format, aligned>(load_piece<type, aligned>(from, column, a.hidden), scale, to, column, a.hidden);
        if (threadIdx.x == 0) reinterpret_cast<u32*>(a.scales)[row] = scale.bits;
    }
}

// Cast blocks of 128 x 128 of one matrix to e4m3, each with a scale; those at the lower and right edges may be smaller. A block of the grid
// casts a block of the matrix at a time, which it keeps in registers. Rows begin at multiples of 16 bytes, and have a multiple of 16
// columns. Called by all threads of the grid.
template <Type type>
MOECOMM_FN void quantize_blocks(const QuantizeArgs& a) {
    __shared__ u32 of_warps[2][kPassWarps];
    constexpr i32 pieces = kQuantGroup / kPieceColumns, abreast = kPassThreads / pieces, kept = kQuantGroup / abreast;
    constexpr i32 eights = kPieceColumns / 8, vectors = sizeof(Piece<type>) / 16 / eights;
    const i32 across = ceil_div(a.hidden, kQuantGroup), blocks = across * ceil_div(a.count, kQuantGroup);
    const i64 x_bytes = static_cast<i64>(a.hidden) * bytes_of(type);
    i32 turn = 0;  // the two halves of of_warps make one barrier a block enough
    for (i32 block = blockIdx.x; block < blocks; block += gridDim.x, turn ^= 1) {
        const i32 column = block % across * kQuantGroup + threadIdx.x % pieces * kPieceColumns;
        const i32 first = block / across * kQuantGroup + threadIdx.x / pieces;
        const auto has = [&](i32 i) { return column < a.hidden && first + i * abreast < a.count; };
        Piece<type> held[kept];
        u32 seen = 0;
#pragma unroll
        for (i32 i = 0; i < kept; ++i) {
            const u8* const row = reinterpret_cast<const u8*>(a.x) + (first + i * abreast) * x_bytes;
            held[i] = load_piece<type, true>(row, has(i) ? column : a.hidden, a.hidden);
        }
#pragma unroll
        for (i32 i = 0; i < kept; ++i) seen = larger<type>(seen, largest_magnitudes<type>(held[i]));
        const float of_warp = largest_in_group<type, kWarp>(seen);
        if (lane_id() == 0) of_warps[turn][warp_id()] = __float_as_uint(of_warp);
        __syncthreads();
        u32 largest = 0;
#pragma unroll
        for (i32 i = 0; i < kPassWarps; ++i) largest = max(largest, of_warps[turn][i]);  // bits of magnitudes are ordered as they are
        const float amax[1] = {__uint_as_float(largest)};
        GroupScale scale[1];
        group_scales<ScaleFormat::fp32>(amax, scale);
#pragma unroll
        for (i32 i = 0; i < kept; ++i) {
            if (!has(i)) continue;
            uint2 out[eights];
#pragma unroll
            for (i32 n = 0; n < eights; ++n) {
                uint4 words[vectors];
#pragma unroll
                for (i32 v = 0; v < vectors; ++v) {
                    const u32* const four = held[i].words + 4 * (n * vectors + v);
                    words[v] = make_uint4(four[0], four[1], four[2], four[3]);
                }
                out[n] = narrow_eight<type>(words, scale[0].up);
            }
            u8* const to = reinterpret_cast<u8*>(a.values) + static_cast<i64>(first + i * abreast) * a.hidden + column;
            *reinterpret_cast<uint4*>(to) = make_uint4(out[0].x, out[0].y, out[1].x, out[1].y);
        }
        if (threadIdx.x == 0) reinterpret_cast<u32*>(a.scales)[block] = scale[0].bits;
    }
}

// `aligned`: rows of x and of values begin at multiples of 16 bytes, and have a multiple of 16 columns.
template <Type type, Format format, bool aligned>
MOECOMM_FN void quantize_rows(const QuantizeArgs& a) {
    if constexpr (is_scaled_by_row(format)) {
        quantize_whole_rows<type, format, aligned>(a);
    } else {
        const float given = a.global_scale != 0 ? *reinterpret_cast<const float*>(a.global_scale) : __int_as_float(a.global_bits);
        quantize_groups<type, format, aligned>(a, GlobalScale(given));
    }
}

}  // namespace moecomm
