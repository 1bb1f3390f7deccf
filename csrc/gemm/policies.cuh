// Where the tiles of a grouped GEMM go.
//
// Out::store(row, column, values)       by any thread: 8 values from `column` on, a multiple of 8, of a row of the product
// Out::store_scale(row, column, scale)  where the product is cast: the scale of its columns from this one on
#pragma once
#include "config.cuh"

namespace moecomm {

// A matrix in our own memory, rows of `columns` values of 2 bytes.
struct StoreRows {
    u64 out;
    i32 columns;

    MOECOMM_FN void store(i32 row, i32 column, const uint4& values) const {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out + (static_cast<u64>(row) * columns + column) * 2), "r"(values.x),
                     "r"(values.y), "r"(values.z), "r"(values.w)
                     : "memory");
    }
};

// The same of values of 1 byte, and their scales.
struct StoreCastRows {
    u64 out, scales;
    i32 columns;
    i64 pitch;  // scales from row to row

    MOECOMM_FN void store(i32 row, i32 column, const uint2& values) const {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(out + static_cast<u64>(row) * columns + column), "r"(values.x), "r"(values.y)
                     : "memory");
    }
    MOECOMM_FN void store_scale(i32 row, i32 column, float scale) const {
        reinterpret_cast<float*>(scales)[row * pitch + column / kScaleGroup] = scale;
    }
};

}  // namespace moecomm
