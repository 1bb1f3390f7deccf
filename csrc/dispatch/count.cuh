// Step 1: how many entries of each expert, and tokens for each rank, are in each chunk of our tokens.
#pragma once
#include "call.cuh"

namespace moecomm {

// The first bad entry as one word that grows with its rank among the bad: ids before weights, then by position.
constexpr u32 kBadId = 0xffffffffu, kBadWeight = 0x7fffffffu;
MOECOMM_BOTH constexpr bool is_bad_id(u32 bad) { return bad > kBadWeight; }
MOECOMM_BOTH constexpr u32 bad_position(u32 bad) { return (is_bad_id(bad) ? kBadId : kBadWeight) - bad; }

template <class Call>
MOECOMM_FN void count_chunk(const Call& c, i32 chunk, i32* counts) {
    constexpr DispatchConfig cfg = Call::cfg;
    u32* bad = &own_state(c.a.ctx)->bad_entry;
    for (i32 i = lane_id(); i < cfg.columns(); i += kWarp) counts[i] = 0;
    __syncwarp();
    for_entries(c, chunk, [&](i32 token, i32 k, i64 id) {
        const i64 entry = static_cast<i64>(token) * cfg.topk + k;
        if (!valid_id(id, cfg.experts)) {
            atomicMax(bad, kBadId - static_cast<u32>(entry));
            id = -1;
        }
        if (token >= 0 && c.a.check_weights != 0) {
            const float w = c.weight_at(entry);
            if (w != w) atomicMax(bad, kBadWeight - static_cast<u32>(entry));
        }
        // A token counts once for a rank: in the first lane of those with the same token and owner.
        const i32 owner = static_cast<i32>(id) / cfg.experts_here();
        const i32 key = id >= 0 ? (lane_id() / cfg.topk) * cfg.ranks + owner : -1;
        const bool first = (__match_any_sync(kAllLanes, key) & lanes_below()) == 0;
        if (id < 0) return;
        atomicAdd(&counts[id], 1);
        if (first) atomicAdd(&counts[cfg.experts + owner], 1);
    });
    __syncwarp();
    for (i32 i = lane_id(); i < cfg.columns(); i += kWarp) *c.chunk_count(i, chunk) = counts[i];
    __syncwarp();
}

// Chunks strided over the warps of the grid that have counters.
template <class Call>
MOECOMM_FN void count(const Call& c) {
    const i32 warp = warp_id();
    if (warp >= Call::cfg.scratch_warps) return;
    const i32 stride = gridDim.x * Call::cfg.scratch_warps;
    for (i32 chunk = blockIdx.x + gridDim.x * warp; chunk < c.chunks(); chunk += stride) count_chunk(c, chunk, c.counter_scratch(warp));
}

}  // namespace moecomm
