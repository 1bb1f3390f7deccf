// Casts of sums as a row of them is staged or returned, to the wire of a combine: values and scales (staged_bytes).
#pragma once
#include "../device/quantize.cuh"
#include "row_hash.cuh"

namespace moecomm {

// Called by all lanes of a warp together. Casts a piece of a row of `hidden` columns and stores it. In each vector of the piece this lane
// has n columns, the first of them `column`, those of the next vector kWarp * n later; `has`: one bit for each vector in which it has such.
// The other sums may be anything, and become 0. In verified rounds, returns the hash of what this lane has stored.
template <CombineConfig cfg, i32 vectors, i32 n>
MOECOMM_FN u64 store_cast(u8* row, i32 column, float (&sum)[vectors][n], u32 has) {
    u32 words[vectors][n / 4], scale[vectors];
#pragma unroll
    for (i32 v = 0; v < vectors; ++v)
#pragma unroll
        for (i32 i = 0; i < n; ++i)
            if ((has >> v & 1) == 0) sum[v][i] = 0.0f;
    quantize_registers<cfg.wire>(sum, words, scale);
    u64 found = 0;
#pragma unroll
    for (i32 v = 0; v < vectors; ++v) {
        if ((has >> v & 1) == 0) continue;
        const i32 first = column + v * kWarp * n, at = scaled_column_at(first), scale_to = scale_at(first, cfg.hidden);
        u8* const to = row + at;
        if constexpr (n == 16) {
            *reinterpret_cast<uint4*>(to) = make_uint4(words[v][0], words[v][1], words[v][2], words[v][3]);
        } else if constexpr (n == 8) {
            *reinterpret_cast<uint2*>(to) = make_uint2(words[v][0], words[v][1]);
        } else {
            *reinterpret_cast<u32*>(to) = words[v][0];
        }
        const bool leads = lane_id() % (kQuantGroup / n) == 0;
        if (leads) *reinterpret_cast<u32*>(row + scale_to) = scale[v];
        if constexpr (cfg.verifies) {
#pragma unroll
            for (i32 i = 0; i < n / 4; ++i) found += hash_word(words[v][i], at / 4 + i);
            if (leads) found += hash_word(scale[v], scale_to / 4);
        }
    }
    return found;
}

}  // namespace moecomm
