// Casts of sums to e4m3 as a row of them is staged or returned: values, then a float32 scale for each group of columns (staged_bytes).
#pragma once
#include "../device/quantize.cuh"
#include "row_hash.cuh"

namespace moecomm {

// Called by all lanes of a warp together. Casts a piece of a row of `hidden` columns and stores it. In each vector of the piece this lane
// has n columns, the first of them `column`, those of the next vector kWarp * n later; `has`: one bit for each vector in which it has such.
// The other sums may be anything, and become 0. If `hashes`, returns the hash of what this lane has stored.
template <bool hashes, i32 vectors, i32 n>
MOECOMM_FN u64 store_cast(u8* row, i32 hidden, i32 column, float (&sum)[vectors][n], u32 has) {
    u32 words[vectors][n / 4], scale[vectors];
#pragma unroll
    for (i32 v = 0; v < vectors; ++v)
#pragma unroll
        for (i32 i = 0; i < n; ++i)
            if ((has >> v & 1) == 0) sum[v][i] = 0.0f;
    quantize_registers(sum, words, scale);
    u64 found = 0;
#pragma unroll
    for (i32 v = 0; v < vectors; ++v) {
        if ((has >> v & 1) == 0) continue;
        const i32 first = column + v * kWarp * n, group = first / kQuantGroup;
        u8* const to = row + first;
        if constexpr (n == 16) {
            *reinterpret_cast<uint4*>(to) = make_uint4(words[v][0], words[v][1], words[v][2], words[v][3]);
        } else if constexpr (n == 8) {
            *reinterpret_cast<uint2*>(to) = make_uint2(words[v][0], words[v][1]);
        } else {
            *reinterpret_cast<u32*>(to) = words[v][0];
        }
        const bool leads = lane_id() % (kQuantGroup / n) == 0;
        if (leads) reinterpret_cast<u32*>(row + hidden)[group] = scale[v];
        if constexpr (hashes) {
#pragma unroll
            for (i32 i = 0; i < n / 4; ++i) found += hash_word(words[v][i], first / 4 + i);
            if (leads) found += hash_word(scale[v], hidden / 4 + group);
        }
    }
    return found;
}

}  // namespace moecomm
