// The epilogue of swapped operands: activation, rounding, transposition in shared memory, stores by rows of the product.
//
// A warpgroup holds 64 columns of the product, or 32 after SwiGLU, of all rows of the tile; with e4m3 it holds two such parts.  A lane's
// registers run across rows (wgmma.cuh).  stmatrix.trans transposes them, so that the columns of a row are contiguous; 8 or 4 lanes then
// store a row of 128 or 64 bytes.
#pragma once
#include "../device/cast.cuh"
#include "../device/grid.cuh"
#include "../device/lanes.cuh"
#include "policies.cuh"
#include "ring.cuh"

namespace moecomm {

template <GemmConfig c>
struct Turned {
    static constexpr i32 columns = c.gated ? 32 : 64;                                     // of the warpgroup, in a part
    static constexpr i32 together = c.out == Type::e4m3 ? c.parts() * columns : columns;  // columns in a staging buffer
    static constexpr i32 chunks = together / 8;                                           // chunks of 16 bytes in a row
    static constexpr i32 room = c.stage_bytes() / (together * 2), rows = room < c.most_rows ? room : c.most_rows;  // in a staging buffer

    // Chunks are permuted, so that neither the 8 rows of a matrix that is stored nor 8 lanes that load have bank conflicts.
    MOECOMM_FN static i32 offset(i32 row, i32 chunk) { return (row * chunks + (chunk ^ (chunks == 4 ? row / 2 % 4 : row % 8))) * 16; }
};

// Stores four 8 x 8 matrices of 2-byte values, transposed.  A whole warp: lane l passes the address of row l % 8 of matrix l / 8.
MOECOMM_FN void store_turned(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1), "r"(m2),
                 "r"(m3)
                 : "memory");
}
MOECOMM_FN uint4 load_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

MOECOMM_FN uint2 load_shared_words(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

template <Type type>
MOECOMM_FN u32 narrow_pair(float first, float second) {
    const float both[2] = {first, second};
    return narrow_word<type>(both);
}
MOECOMM_FN float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }
// Returns the activated value of a gate and an up accumulator.  Other activations than SwiGLU lie in place of the gate (finish.cuh).
template <GemmConfig c>
MOECOMM_FN float gated(float gate, float up) {
    if constexpr (c.activation == Activation::swiglu) {
        return swiglu(gate, up);
    } else {
        return gate;
    }
}

// Activates, rounds and transposes rows `from` to `from + Turned::rows` of a part into `staging`.  Called by a whole warpgroup; a barrier
// must follow before the rows are loaded.
template <GemmConfig c, i32 from, i32 part = 0, i32 size>
MOECOMM_FN void turn(const float (&accum)[size], u32 staging) {
    using T = Turned<c>;
    // Type of the product before a cast.
    constexpr Type type = c.out == Type::e4m3 ? Type::bf16 : c.out;
    constexpr i32 rows = T::rows < c.most_rows - from ? T::rows : c.most_rows - from;
    const i32 lane = lane_id(), warp = warp_id() % 4;
    if constexpr (c.gated) {
#pragma unroll
        for (i32 row = 0; row < rows; row += 32) {
            u32 m[4];
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                const i32 at = (from + row + 8 * i) / 2;
                m[i] = at < size ? narrow_pair<type>(gated<c>(accum[at], accum[at + 2]), gated<c>(accum[at + 1], accum[at + 3])) : 0;
            }
            store_turned(staging + T::offset(row + lane, 4 * part + warp), m[0], m[1], m[2], m[3]);
        }
    } else {
#pragma unroll
        for (i32 row = 0; row < rows; row += 16) {
            u32 m[4];
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                const i32 at = (from + row + i / 2 * 8) / 2 + i % 2 * 2;
                m[i] = narrow_pair<type>(accum[at], accum[at + 1]);
            }
            store_turned(staging + T::offset(row + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2), m[0], m[1], m[2], m[3]);
        }
    }
}

// Stores a part of a tile through `out`.  Called by a whole warpgroup; `barrier` is its named barrier.  `turns` counts staging steps over
// all tiles: buffers alternate, so that one barrier a step orders both the loads of this step and the next overwrite.
template <GemmConfig c, i32 from = 0, class Out, i32 size>
MOECOMM_FN void store_tile(const float (&accum)[size], const Tile& tile, i32 column, i32 columns, u32 staging, i32 barrier, u32& turns,
                           const Out& out) {
    using T = Turned<c>;
    if (from >= tile.rows) return;
    const u32 place = staging + turns++ % 2 * c.stage_bytes();
    turn<c, from>(accum, place);
    barrier_sync(barrier, kWarpgroup);
    const i32 thread = threadIdx.x % kWarpgroup;
#pragma unroll
    for (i32 i = thread; i < T::rows * T::chunks; i += kWarpgroup) {
        const i32 row = i / T::chunks, chunk = i % T::chunks;
        if (from + row < tile.rows && column + chunk * 8 < columns)
            out.store(tile.row + from + row, column + chunk * 8, load_shared(place + T::offset(row, chunk)));
    }
    if constexpr (from + T::rows < c.most_rows) store_tile<c, from + T::rows>(accum, tile, column, columns, staging, barrier, turns, out);
}

// Stores all parts that a warpgroup holds of a tile.  `group`: index of the warpgroup over all column tiles.
template <GemmConfig c, i32 part = 0, class Out, i32 size>
MOECOMM_FN void store_parts(const float (&accum)[c.parts()][size], const Tile& tile, i32 group, i32 columns, u32 staging, i32 barrier,
                            u32& turns, const Out& out) {
    store_tile<c>(accum[part], tile, (group * c.parts() + part) * Turned<c>::columns, columns, staging, barrier, turns, out);
    if constexpr (part + 1 < c.parts()) store_parts<c, part + 1>(accum, tile, group, columns, staging, barrier, turns, out);
}

}  // namespace moecomm
