// Store policies of the epilogue: destinations of a product's tiles.  Any single thread may call them; stores are ordinary (unordered),
// and the caller fences before it signals.
//
// Out::store(row, column, values)       stores 8 values of a row, from `column` on, a multiple of 8
// Out::store_scale(row, column, scale)  where the product is cast: the scale of kScaleGroup columns from `column` on
#pragma once
#include "config.cuh"

namespace moecomm {

// A matrix in local memory, rows of `columns` values of 2 bytes.
struct StoreRows {
    u64 out;
    i32 columns;

    MOECOMM_FN void store(i32 row, i32 column, const uint4& values) const {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out + (static_cast<u64>(row) * columns + column) * 2), "r"(values.x),
                     "r"(values.y), "r"(values.z), "r"(values.w)
                     : "memory");
    }
};

// A matrix in local memory, rows of `columns` values of 1 byte, with fp32 scales.
struct StoreCastRows {
    u64 out, scales;
    i32 columns;
    i64 pitch;  // of scales, in elements

    MOECOMM_FN void store(i32 row, i32 column, const uint2& values) const {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(out + static_cast<u64>(row) * columns + column), "r"(values.x), "r"(values.y)
                     : "memory");
    }
    MOECOMM_FN void store_scale(i32 row, i32 column, float scale) const {
        reinterpret_cast<float*>(scales)[row * pitch + column / kScaleGroup] = scale;
    }
};

}  // namespace moecomm
