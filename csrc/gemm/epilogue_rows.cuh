// The epilogue of products whose operand A is x (scaled_rows.cuh).
//
// A warp holds all columns of the block of 16 rows, so it stores them without other warps.  stmatrix writes 128 bytes of each row to shared
// memory in row order, and 8 lanes store the row's.  Where the product is cast, the 128 columns that share a scale are in registers of four
// lanes; for a tile of at most 64 rows, half of them are in the other warpgroup (share_largest).
#pragma once
#include "epilogue.cuh"
#include "scaled_rows.cuh"

namespace moecomm {

constexpr i32 kWarpRows = 16, kStagedRowBytes = 128;

// Chunks of 16 bytes are permuted, so that neither the 8 rows of a matrix that is stored nor 8 lanes that load have bank conflicts.
MOECOMM_FN u32 staged_at(u32 staging, i32 row, i32 chunk) { return staging + (row * 8 + (chunk ^ row % 8)) * 16; }

// Stores four 8 x 8 matrices of 2-byte values.  A whole warp: lane l passes the address of row l % 8 of matrix l / 8.
MOECOMM_FN void store_matrices(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}
// Stages `chunks` chunks of 16 bytes of each of the warp's 16 rows.  A whole warp; `words`: of each chunk, a word of the lane's first row
// and one of its second.  Staged words are visible to the warp on return.
template <i32 chunks>
MOECOMM_FN void stage_rows(u32 staging, const u32 (&words)[chunks][2]) {
    const i32 lane = lane_id();
    __syncwarp();  // earlier contents have been read
#pragma unroll
    for (i32 chunk = 0; chunk < chunks; chunk += 2)
        store_matrices(staged_at(staging, lane % 16, chunk + lane / 16), words[chunk][0], words[chunk][1], words[chunk + 1][0],
                       words[chunk + 1][1]);
    __syncwarp();
}
// Calls store(row, chunk, values) for every staged chunk.  A whole warp.
template <i32 chunks, class Store>
MOECOMM_FN void for_staged(u32 staging, const Store& store) {
#pragma unroll
    for (i32 i = lane_id(); i < kWarpRows * chunks; i += kWarp)
        store(i / chunks, i % chunks, load_shared(staged_at(staging, i / chunks, i % chunks)));
}

// Returns two neighboring columns of the product, activated and rounded: of the lane's first or second row, in the `eight`-th group of 8
// columns of a part.
template <GemmConfig c, i32 size>
MOECOMM_FN u32 made_of(const float (&accum)[size], i32 eight, i32 second) {
    constexpr Type type = c.out == Type::e4m3 ? Type::bf16 : c.out;
    if constexpr (c.gated) {
        const float* const gate = accum + 8 * eight + 2 * second;
        return narrow_pair<type>(gated<c>(gate[0], gate[4]), gated<c>(gate[1], gate[5]));
    } else {
        const float* const at = accum + 4 * eight + 2 * second;
        return narrow_pair<type>(at[0], at[1]);
    }
}

// A warp's share of the product: `rows` rows from `first` on, columns from `column` on (`columns` in the whole product).
struct Placed {
    i32 first, rows, column, columns;
};

// Stores a warp's share without a cast, 64 columns at a time.  A whole warp.
template <GemmConfig c, i32 parts, i32 size, class Out>
MOECOMM_FN void store_as_made(const float (&accum)[c.parts()][size], const Placed& at, u32 staging, const Out& out) {
    constexpr i32 each = (c.gated ? kRowsPart / 2 : kRowsPart) / 64;  // pieces, in a part
#pragma unroll
    for (i32 piece = 0; piece < parts * each; ++piece) {
        u32 words[8][2];
#pragma unroll
        for (i32 i = 0; i < 16; ++i) words[i / 2][i % 2] = made_of<c>(accum[piece / each], piece % each * 8 + i / 2, i % 2);
        stage_rows(staging, words);
        for_staged<8>(staging, [&](i32 row, i32 chunk, const uint4& values) {
            const i32 column = at.column + piece * 64 + chunk * 8;
            if (row < at.rows && column < at.columns) out.store(at.first + row, column, values);
        });
    }
}

MOECOMM_FN void store_shared_words(u32 address, u32 first, u32 second) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}
// Replaces the largest magnitude of each of a lane's two rows by the maximum over both warpgroups, where each holds half of the columns of
// these rows.  Called by all threads of both math warpgroups, which meet at a named barrier twice.
MOECOMM_FN void share_largest(u32 (&largest)[2], u32 mine, u32 other) {
    __syncwarp();  // earlier contents have been read
    store_shared_words(mine + lane_id() * 8, largest[0], largest[1]);
    barrier_sync(1 + kMathGroups, kMathGroups * kWarpgroup);
    const float2 seen = load_shared_pair(other + lane_id() * 8);
    largest[0] = larger<Type::bf16>(largest[0], __float_as_uint(seen.x));
    largest[1] = larger<Type::bf16>(largest[1], __float_as_uint(seen.y));
    barrier_sync(1 + kMathGroups, kMathGroups * kWarpgroup);  // the staging may be overwritten again
}

// Casts a warp's share to e4m3 and stores it with its scales: the same bits as epilogue_cast.cuh.  A whole warp, or, with half of the
// parts, all warps of both math warpgroups.  `other`: staging of the warp that holds the other columns of these rows, if there is one.
template <GemmConfig c, i32 parts, i32 size, class Out>
MOECOMM_FN void store_as_cast(const float (&accum)[c.parts()][size], const Placed& at, u32 staging, u32 other, const Out& out) {
    static_assert(c.gated && c.parts() * size == kScaleGroup, "all parts are a group of columns");
    constexpr i32 of_part = size / 8, eights = parts * of_part;
    u32 values[eights][2], largest[2] = {};
#pragma unroll
    for (i32 i = 0; i < 2 * eights; ++i) {
        const i32 eight = i / 2;
        u32& value = values[eight][i % 2];
        value = at.column + eight * 8 < at.columns ? made_of<c>(accum[eight / of_part], eight % of_part, i % 2) : 0;
        largest[i % 2] = larger<Type::bf16>(largest[i % 2], magnitudes<Type::bf16>(value));
    }
    if constexpr (parts < c.parts()) share_largest(largest, staging, other);
    const float seen[2] = {largest_in_group<Type::bf16, 4>(largest[0]), largest_in_group<Type::bf16, 4>(largest[1])};
    GroupScale scale[2];
    group_scales<ScaleFormat::fp32>(seen, scale);
    // A word holds a lane's two columns of 8 and its two of the next 8; the words of four lanes hold 16 columns.
    u32 words[eights / 2][2];
#pragma unroll
    for (i32 i = 0; i < eights; ++i) {
        u32 pairs[2];
#pragma unroll
        for (i32 j = 0; j < 2; ++j) {
            float wide[2];
            widen_word<Type::bf16>(values[i / 2 * 2 + j][i % 2], wide);
            pairs[j] = narrow_e4m3(__fmul_rn(wide[0], scale[i % 2].up), __fmul_rn(wide[1], scale[i % 2].up));
        }
        words[i / 2][i % 2] = pairs[0] | pairs[1] << 16;
    }
    stage_rows(staging, words);
    for_staged<eights / 2>(staging, [&](i32 row, i32 chunk, const uint4& four) {
        const i32 column = at.column + chunk * 16;
        if (row >= at.rows) return;
        if (column < at.columns)
            out.store(at.first + row, column, make_uint2((four.x & 0xffffu) | four.y << 16, (four.z & 0xffffu) | four.w << 16));
        if (column + 8 < at.columns)
            out.store(at.first + row, column + 8, make_uint2(four.x >> 16 | (four.y & 0xffff0000u), four.z >> 16 | (four.w & 0xffff0000u)));
    });
    const i32 lane = lane_id();
    if (lane % 4 != 0 || at.column % kScaleGroup != 0 || at.column >= at.columns) return;
#pragma unroll
    for (i32 i = 0; i < 2; ++i)
        if (lane / 4 + 8 * i < at.rows) out.store_scale(at.first + lane / 4 + 8 * i, at.column, __uint_as_float(scale[i].bits));
}

template <GemmConfig c, i32 parts, i32 size, class Out>
MOECOMM_FN void store_share(const float (&accum)[c.parts()][size], const Placed& at, u32 staging, u32 other, const Out& out) {
    if constexpr (c.out == Type::e4m3) {
        store_as_cast<c, parts>(accum, at, staging, other, out);
    } else {
        store_as_made<c, parts>(accum, at, staging, out);
    }
}
// Stores a warpgroup's share of a tile in column block `block`.  Called by both math warpgroups; they meet at a named barrier only where
// the product is cast and the tile has at most 64 rows.  `staging`: of all warps of both warpgroups.
template <GemmConfig c, i32 size, class Out>
MOECOMM_FN void store_rows(const float (&accum)[c.parts()][size], const Tile& tile, i32 block, i32 columns, u32 staging, i32 math_group,
                           const Out& out) {
    constexpr i32 room = kWarpRows * kStagedRowBytes, part_columns = c.gated ? kRowsPart / 2 : kRowsPart;
    static_assert(2 * c.stage_bytes() == 4 * room, "what a warp has of a warpgroup's");
    const Share<c> share(tile.rows, math_group);
    const i32 warp = warp_id() % 4, from = share.first_row + warp * kWarpRows;
    const Placed at{tile.row + from, tile.rows - from, (block * c.parts() + share.first_part) * part_columns, columns};
    const u32 mine = staging + (math_group * 4 + warp) * room;
    if (!share.all_parts) {
        store_share<c, 1>(accum, at, mine, staging + ((1 - math_group) * 4 + warp) * room, out);
    } else {
        store_share<c, c.parts()>(accum, at, mine, mine, out);
    }
}

}  // namespace moecomm
