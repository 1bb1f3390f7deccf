// The epilogue of a product that is cast to e4m3, with a scale for 128 columns of a row.  It leaves the same bits as a dispatch that casts
// the bf16 product.
//
// The 128 columns belong to one block, 64 to each warpgroup.  Both warpgroups transpose the same rows and meet at a barrier; then 16 lanes
// cast a row.
#pragma once
#include "epilogue.cuh"

namespace moecomm {

constexpr i32 kCastLanes = kScaleGroup / 8;  // lanes of a row, 8 columns each

// Casts 8 columns and stores them and, in the first lane of the row, the scale.  Called by a whole warp (it reduces over kCastLanes lanes);
// only lanes with `there` store.
template <class Out>
MOECOMM_FN void store_eight(const uint4& values, i32 row, i32 column, bool there, const Out& out) {
    const float seen[1] = {largest_in_group<Type::bf16, kCastLanes>(largest_magnitudes<Type::bf16>(values))};
    GroupScale scale[1];
    group_scales<ScaleFormat::fp32>(seen, scale);
    if (!there) return;
    out.store(row, column, narrow_eight<Type::bf16>(&values, scale[0].up));
    if (column % kScaleGroup == 0) out.store_scale(row, column, __uint_as_float(scale[0].bits));
}

// Casts and stores a tile.  Called by all threads of both math warpgroups, which meet at named barrier 1 + kMathGroups at each step.
// `staging`: the first warpgroup's buffers; the second's follow.
template <GemmConfig c, i32 from = 0, class Out, i32 size>
MOECOMM_FN void store_cast(const float (&accum)[c.parts()][size], const Tile& tile, i32 block, i32 columns, u32 staging, i32 math_group,
                           u32& turns, const Out& out) {
    using T = Turned<c>;
    static_assert(c.parts() == 2 && kMathGroups * T::together == kScaleGroup, "a block has a group of columns, with SwiGLU");
    if (from >= tile.rows) return;
    constexpr i32 all = 2 * c.stage_bytes(), threads = kMathGroups * kWarpgroup;
    const u32 place = staging + turns++ % 2 * c.stage_bytes();
    turn<c, from, 0>(accum[0], place + math_group * all);
    turn<c, from, 1>(accum[1], place + math_group * all);
    barrier_sync(1 + kMathGroups, threads);
    const i32 thread = threadIdx.x - kWarpgroup, chunk = thread % kCastLanes, column = block * kScaleGroup + chunk * 8;
    static_assert(T::rows * kCastLanes % threads == 0, "whole warps cast");
#pragma unroll
    for (i32 i = 0; i < T::rows * kCastLanes / threads; ++i) {  // as often for every thread, so that warps stay together
        const i32 row = thread / kCastLanes + i * (threads / kCastLanes);
        uint4 values = make_uint4(0, 0, 0, 0);
        if (column < columns) values = load_shared(place + chunk / T::chunks * all + T::offset(row, chunk % T::chunks));
        store_eight(values, tile.row + from + row, column, from + row < tile.rows && column < columns, out);
    }
    if constexpr (from + T::rows < c.most_rows) store_cast<c, from + T::rows>(accum, tile, block, columns, staging, math_group, turns, out);
}

}  // namespace moecomm
