// Vectors of 16 bytes that other ranks, or other blocks, write during this launch.
#pragma once
#include "../device/cast.cuh"
#include "../device/lanes.cuh"

namespace moecomm {

// Any thread; relaxed, so the caller has acquired a flag before. Bypasses L1, as load_fresh does.
MOECOMM_FN uint4 load_vector(u64 from) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
// Any thread; unordered. `to`: any rank's memory.
MOECOMM_FN void store_vector(u64 to, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// As load_vector, or an ordinary load where nobody writes the source during this launch.
template <bool fresh>
MOECOMM_FN uint4 load_either(u64 from) {
    if constexpr (fresh) {
        return load_vector(from);
    } else {
        return *reinterpret_cast<const uint4*>(from);
    }
}
// Copies `bytes`, a multiple of 16. A whole warp; unordered. `fresh`: others write the source during this launch.
template <bool fresh>
MOECOMM_FN void copy_vectors(u64 to, u64 from, i64 bytes) {
    constexpr i32 together = 8, step = kWarp * 16;  // loads of a lane in flight; bytes
    i32 left = static_cast<i32>(bytes / 16) - lane_id();
    to += lane_id() * 16, from += lane_id() * 16;
    for (; left > (together - 1) * kWarp; left -= together * kWarp, to += together * step, from += together * step) {
        uint4 held[together];
#pragma unroll
        for (i32 i = 0; i < together; ++i) held[i] = load_either<fresh>(from + i * step);
#pragma unroll
        for (i32 i = 0; i < together; ++i) store_vector(to + i * step, held[i]);
    }
    for (; left > 0; left -= kWarp, to += step, from += step) store_vector(to, load_either<fresh>(from));
}

// Copies `count` words of 4 bytes. As copy_vectors().
template <bool fresh>
MOECOMM_FN void copy_words(u64 to, u64 from, i64 count) {
    const u32* const source = reinterpret_cast<const u32*>(from);
#pragma unroll 4
    for (i64 i = lane_id(); i < count; i += kWarp) reinterpret_cast<u32*>(to)[i] = fresh ? load_relaxed(source + i) : source[i];
}

// Adds 8 columns of 2 bytes to sums, in float32.
template <Type type>
MOECOMM_FN void add_eight(float (&sums)[8], const uint4& v) {
    float wide[8];
    widen<type>(v, wide);
#pragma unroll
    for (i32 i = 0; i < 8; ++i) sums[i] = __fadd_rn(sums[i], wide[i]);
}
template <Type type>
MOECOMM_FN uint4 narrow_all(const float (&sums)[8]) {
    return make_uint4(narrow_word<type>(sums), narrow_word<type>(sums + 2), narrow_word<type>(sums + 4), narrow_word<type>(sums + 6));
}

}  // namespace moecomm
