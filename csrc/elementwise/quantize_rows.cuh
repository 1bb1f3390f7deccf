// Casts of rows to formats of payloads, as a pass over them: of one matrix, or of several, one after the other (window/weights.cuh).
#pragma once
#include "../device/format_casts.cuh"
#include "row_pass.cuh"

namespace moecomm {

constexpr i32 kPiecesKept = 2;  // pieces of a row that a thread keeps in registers while the block finds the row's scale

// Where a warp or a block begins in the next matrix, counted in its pieces of work, so that all of them get equally many pieces of all
// matrices together. `turn`: half of the shared memory for its next row or block of a matrix.
struct Walk {
    i64 at;
    i32 turn;
};

// Is told what a thread stores. This one does nothing; HashOfCast in window/weights.cuh hashes it.
struct Untold {
    template <i32 words>
    MOECOMM_FN void values(i64, const u32 (&)[words]) {}  // `words` at a byte of the matrix
    MOECOMM_FN void value(i64, u32) {}                    // one byte of it
    template <class T>
    MOECOMM_FN void scale(i64, T) {}  // the nth scale
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

// Store a piece's values, 8 or 16 bytes, and tell of them. `values`: of the matrix; `row`: of the row there, in bytes. Rows of 4-bit
// values have an even number of columns.
template <Format format, bool aligned, class Told>
MOECOMM_FN void store_piece(u8* values, i64 row, i32 column, i32 columns, const u32 (&words)[kPieceColumns * bits_of(format) / 32],
                            Told& told) {
    if (column >= columns) return;
    const i64 at = row + static_cast<i64>(column) * bits_of(format) / 8;
    u8* const to = values + at;
    if constexpr (!aligned) {
        const i32 bytes = min(kPieceColumns, columns - column) * bits_of(format) / 8;
#pragma unroll
        for (i32 i = 0; i < kPieceColumns * bits_of(format) / 8; ++i) {
            if (i >= bytes) continue;
            const u8 byte = static_cast<u8>(words[i / 4] >> 8 * (i % 4));
            to[i] = byte;
            told.value(at + i, byte);
        }
        return;
    } else if constexpr (is_e2m1(format)) {
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    told.values(at, words);
}

// Cast a piece of the row at `row` bytes of the matrix, store it and tell of it.
template <Type type, Format format, bool aligned, class Told>
MOECOMM_FN void cast_piece(const Piece<type>& piece, const ValueScale& scale, u8* values, i64 row, i32 column, i32 columns, Told& told) {
    u32 out[kPieceColumns * bits_of(format) / 32];
    narrow_piece<type, format>(piece, scale, out);
    store_piece<format, aligned>(values, row, column, columns, out, told);
}
// Likewise of one row, without telling.
template <Type type, Format format, bool aligned>
MOECOMM_FN void cast_piece(const Piece<type>& piece, const ValueScale& scale, u8* row, i32 column, i32 columns) {
    Untold none;
    cast_piece<type, format, aligned>(piece, scale, row, 0, column, columns, none);
}

// Called by all threads of the grid; a warp casts up to 512 columns of a row at a time, which need nothing of other columns.
template <Type type, Format format, bool aligned, class Told>
MOECOMM_FN void quantize_groups(const QuantizeArgs& a, const GlobalScale& given, Walk& walk, Told& told) {
    constexpr i32 group = group_of(format), lanes = group == 0 ? 1 : group / kPieceColumns;
    const i32 segments = ceil_div(a.hidden, kWarp * kPieceColumns), all = a.count * segments;
    const i64 x_bytes = static_cast<i64>(a.hidden) * bytes_of(type), value_bytes = static_cast<i64>(a.hidden) * bits_of(format) / 8;
    for (; walk.at < all; walk.at += all_warps()) {
        const i32 segment = static_cast<i32>(walk.at), row = segment / segments;
        const i32 column = (segment % segments * kWarp + lane_id()) * kPieceColumns;
        const Piece<type> piece = load_piece<type, aligned>(reinterpret_cast<const u8*>(a.x) + row * x_bytes, column, a.hidden);
        float amax = 0.0f;
        if constexpr (group != 0) amax = largest_in_group<type, lanes>(largest_magnitudes<type>(piece));
        const ValueScale scale = value_scale<format>(amax, given);
        cast_piece<type, format, aligned>(piece, scale, reinterpret_cast<u8*>(a.values), row * value_bytes, column, a.hidden, told);
        if constexpr (group != 0) {
            if (lane_id() % lanes != 0 || column >= a.hidden) continue;
            const i64 nth = static_cast<i64>(row) * ceil_div(a.hidden, group) + column / group;
            store_scale<format>(reinterpret_cast<void*>(a.scales), nth, scale);
            if constexpr (format == Format::int8_group) {
                told.scale(nth, scale.bits);
            } else {
                told.scale(nth, static_cast<u8>(scale.bits));
            }
        }
    }
    walk.at -= all;
}

// Called by all threads of the grid; a block casts a row at a time. What of it does not fit in registers is read twice.
template <Type type, Format format, bool aligned, class Told>
MOECOMM_FN void quantize_whole_rows(const QuantizeArgs& a, Walk& walk, Told& told) {
    __shared__ u32 of_warps[2][kPassWarps];
    const i64 x_bytes = static_cast<i64>(a.hidden) * bytes_of(type);
    constexpr i32 stride = kPassThreads * kPieceColumns;
    const i32 first = threadIdx.x * kPieceColumns;
    // The two halves of of_warps make one barrier a row enough.
    for (; walk.at < a.count; walk.at += gridDim.x, walk.turn ^= 1) {
        const i64 row = walk.at, to = row * a.hidden;
        const u8* const from = reinterpret_cast<const u8*>(a.x) + row * x_bytes;
        u8* const values = reinterpret_cast<u8*>(a.values);
        Piece<type> kept[kPiecesKept];
        u32 seen = 0;
#pragma unroll
        for (i32 i = 0; i < kPiecesKept; ++i) kept[i] = load_piece<type, aligned>(from, first + i * stride, a.hidden);
#pragma unroll
        for (i32 i = 0; i < kPiecesKept; ++i) seen = larger<type>(seen, largest_magnitudes<type>(kept[i]));
        for (i32 column = first + kPiecesKept * stride; column < a.hidden; column += stride)
            seen = larger<type>(seen, largest_magnitudes<type>(load_piece<type, aligned>(from, column, a.hidden)));
        const float of_warp = largest_in_group<type, kWarp>(seen);
        if (lane_id() == 0) of_warps[walk.turn][warp_id()] = __float_as_uint(of_warp);
        __syncthreads();
        u32 amax = 0;
#pragma unroll
        for (i32 i = 0; i < kPassWarps; ++i) amax = max(amax, of_warps[walk.turn][i]);  // bits of magnitudes are ordered as they are
        const ValueScale scale = value_scale<format>(__uint_as_float(amax), {});
#pragma unroll
        for (i32 i = 0; i < kPiecesKept; ++i)
            cast_piece<type, format, aligned>(kept[i], scale, values, to, first + i * stride, a.hidden, told);
        for (i32 column = first + kPiecesKept * stride; column < a.hidden; column += stride)
            cast_piece<type, format, aligned>(load_piece<type, aligned>(from, column, a.hidden), scale, values, to, column, a.hidden, told);
        if (threadIdx.x == 0) {
            reinterpret_cast<u32*>(a.scales)[row] = scale.bits;
            told.scale(row, scale.bits);
        }
    }
    walk.at -= a.count;
}

// Cast blocks of 128 x 128 of one matrix to e4m3, each with a scale; those at the lower and right edges may be smaller. A block of the grid
// casts a block of the matrix at a time, which it keeps in registers. Rows begin at multiples of 16 bytes, and have a multiple of 16
// columns. Called by all threads of the grid.
template <Type type, class Told>
MOECOMM_FN void quantize_blocks(const QuantizeArgs& a, Walk& walk, Told& told) {
    __shared__ u32 of_warps[2][kPassWarps];
    constexpr i32 pieces = kQuantGroup / kPieceColumns, abreast = kPassThreads / pieces, kept = kQuantGroup / abreast;
    constexpr i32 eights = kPieceColumns / 8, vectors = sizeof(Piece<type>) / 16 / eights;
    const i32 across = ceil_div(a.hidden, kQuantGroup), blocks = across * ceil_div(a.count, kQuantGroup);
    const i64 x_bytes = static_cast<i64>(a.hidden) * bytes_of(type);
    // The two halves of of_warps make one barrier a block enough.
    for (; walk.at < blocks; walk.at += gridDim.x, walk.turn ^= 1) {
        const i32 block = static_cast<i32>(walk.at);
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
        if (lane_id() == 0) of_warps[walk.turn][warp_id()] = __float_as_uint(of_warp);
        __syncthreads();
        u32 largest = 0;
#pragma unroll
        for (i32 i = 0; i < kPassWarps; ++i) largest = max(largest, of_warps[walk.turn][i]);  // bits of magnitudes are ordered as they are
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
            const i64 at = static_cast<i64>(first + i * abreast) * a.hidden + column;
            const u32 stored[4] = {out[0].x, out[0].y, out[1].x, out[1].y};
            *reinterpret_cast<uint4*>(reinterpret_cast<u8*>(a.values) + at) = make_uint4(stored[0], stored[1], stored[2], stored[3]);
            told.values(at, stored);
        }
        if (threadIdx.x == 0) {
            reinterpret_cast<u32*>(a.scales)[block] = scale[0].bits;
            told.scale(block, scale[0].bits);
        }
    }
    walk.at -= blocks;
}
template <Type type>
MOECOMM_FN void quantize_blocks(const QuantizeArgs& a) {
    Walk walk{static_cast<i64>(blockIdx.x), 0};
    Untold none;
    quantize_blocks<type>(a, walk, none);
}

// `aligned`: rows of x and of values begin at multiples of 16 bytes, and have a multiple of 16 columns.
template <Type type, Format format, bool aligned>
MOECOMM_FN void quantize_rows(const QuantizeArgs& a) {
    Untold none;
    if constexpr (is_scaled_by_row(format)) {
        Walk walk{static_cast<i64>(blockIdx.x), 0};
        quantize_whole_rows<type, format, aligned>(a, walk, none);
    } else {
        const float given = a.global_scale != 0 ? *reinterpret_cast<const float*>(a.global_scale) : __int_as_float(a.global_bits);
        Walk walk{static_cast<i64>(first_of_warp()), 0};
        quantize_groups<type, format, aligned>(a, GlobalScale(given), walk, none);
    }
}

}  // namespace moecomm
