// Casts of rows that have one scale each, to e4m3 or int8: rows of x as they are published, and rows of the first product before the second
// GEMM multiplies them.  The bits are those of elementwise/quantize_rows.cuh.
#pragma once
#include "../elementwise/quantize_rows.cuh"

namespace moecomm {

MOECOMM_BOTH constexpr Format row_format(bool integers) { return integers ? Format::int8_token : Format::fp8_token; }

// Loads 16 bytes that other blocks have written during this launch; see load_fresh.
MOECOMM_FN uint4 load_vector_fresh(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// Loads a piece of a row, with zeros where the row has no more columns.  `fresh`: past L1.
template <Type type, bool fresh>
MOECOMM_FN Piece<type> load_columns_of(const u8* row, i32 column, i32 columns) {
    if constexpr (!fresh) return load_piece<type, true>(row, column, columns);
    Piece<type> piece{};
    if (column >= columns) return piece;
    const uint4* const from = reinterpret_cast<const uint4*>(row + static_cast<i64>(column) * bytes_of(type));
#pragma unroll
    for (i32 i = 0; i < static_cast<i32>(sizeof(piece.words)) / 16; ++i) {
        const uint4 four = load_vector_fresh(from + i);
        piece.words[4 * i] = four.x, piece.words[4 * i + 1] = four.y, piece.words[4 * i + 2] = four.z, piece.words[4 * i + 3] = four.w;
    }
    return piece;
}

// Casts a row of `columns` columns, a multiple of 16, and stores its scale.  A whole warp; rows and values begin at multiples of 16 bytes.
// Registers keep `kept` pieces a lane; what of a row does not fit in them is read twice.
template <Type type, Format format, i32 kept, bool fresh>
MOECOMM_FN void cast_whole_row(const u8* from, i32 columns, u8* to, float* scale) {
    constexpr i32 step = kWarp * kPieceColumns;
    const i32 first = lane_id() * kPieceColumns;
    Piece<type> pieces[kept];
    u32 seen = 0;
#pragma unroll
    for (i32 i = 0; i < kept; ++i) pieces[i] = load_columns_of<type, fresh>(from, first + i * step, columns);
#pragma unroll
    for (i32 i = 0; i < kept; ++i) seen = larger<type>(seen, largest_magnitudes(pieces[i]));
#pragma unroll 1
    for (i32 column = first + kept * step; column < columns; column += step)
        seen = larger<type>(seen, largest_magnitudes(load_columns_of<type, fresh>(from, column, columns)));
    __syncwarp();
    const ValueScale by = value_scale<format>(largest_in_group<type, kWarp>(seen), {});
#pragma unroll
    for (i32 i = 0; i < kept; ++i) cast_piece<type, format, true>(pieces[i], by, to, first + i * step, columns);
#pragma unroll 1
    for (i32 column = first + kept * step; column < columns; column += step)
        cast_piece<type, format, true>(load_columns_of<type, fresh>(from, column, columns), by, to, column, columns);
    __syncwarp();
    if (lane_id() == 0) *scale = __uint_as_float(by.bits);
}

}  // namespace moecomm
