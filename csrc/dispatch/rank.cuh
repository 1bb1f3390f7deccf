// Step 4, first half: the row of every entry of our tokens (csrc/protocol/slots.h), into the route, where the send warps read it.
#pragma once
#include "call.cuh"

namespace moecomm {

// Lanes with the same key as ours; -1 is alone.
MOECOMM_FN u32 lanes_with(i32 key) { return __match_any_sync(kAllLanes, key >= 0 ? key : -1 - lane_id()); }

// Entries of one expert, and tokens for one rank, take consecutive rows: the base of the block, and `cursors` of all columns, stand at the
// next of each.
template <class Call>
MOECOMM_FN void rank_entries(const Call& c, i32 chunk, i32* cursors) {
    constexpr DispatchConfig cfg = Call::cfg;
    auto* token_rows = reinterpret_cast<i32*>(c.a.route.token_rows);
    auto* token_owner = reinterpret_cast<i32*>(c.a.route.token_owner);
    auto* token_slot = reinterpret_cast<i32*>(c.a.route.token_slot);
    const u32 below = lanes_below();
    for_entries(c, chunk * c.a.chunk_tokens, c.chunk_end(chunk), 0, 1, [&](i32 token, i32 k, i64 id) {
        const i32 expert = static_cast<i32>(id), owner = id >= 0 ? expert / cfg.experts_here() : -1;
        const u32 same = lanes_with(expert);
        const u32 mates = lanes_of_rank<cfg.ranks>(owner) & lanes_of_token<cfg.topk>();  // at our owner
        const bool leads = id >= 0 && (mates & below) == 0;
        const u32 leaders = lanes_of_rank<cfg.ranks>(leads ? owner : -1);
        const i32 row = id >= 0 ? c.shared.base[expert] + cursors[expert] + __popc(same & below) : -1;
        i32 slot = leads ? c.shared.base[cfg.experts + owner] + cursors[cfg.experts + owner] + __popc(leaders & below) : -1;
        slot = __shfl_sync(kAllLanes, slot, mates != 0 ? __ffs(mates) - 1 : lane_id());
        __syncwarp();
        if (id >= 0 && (same & below) == 0) cursors[expert] += __popc(same);
        if (leads && (leaders & below) == 0) cursors[cfg.experts + owner] += __popc(leaders);
        __syncwarp();
        if (token < 0) return;
        const i64 entry = static_cast<i64>(token) * cfg.topk + k;
        token_rows[entry] = cfg.layout == Layout::flat ? slot : row;
        token_owner[entry] = owner;
        if (leads) token_slot[static_cast<i64>(token) * cfg.ranks + owner] = slot;
    });
}

// The chunk's flat rows at each rank, as they go into its flag.
template <class Call>
MOECOMM_FN void keep_range(const Call& c, i32 chunk, i32 rank, i32 first, i32 end) {
    *c.range(rank, chunk) = signal_word(chunk_signal(0, first, end - first));
}

template <class Call>
MOECOMM_FN void rank_chunk(const Call& c, i32 chunk, i32* cursors) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i64 first = static_cast<i64>(chunk) * c.a.chunk_tokens;
    auto* slots = reinterpret_cast<i32*>(c.a.route.token_slot) + first * cfg.ranks;
    for (i32 i = lane_id(); i < (c.chunk_end(chunk) - first) * cfg.ranks; i += kWarp) slots[i] = -1;
    i32 range_first[cfg.peers_per_lane()];
#pragma unroll
    for (i32 i = 0; i < cfg.peers_per_lane(); ++i) {
        const i32 p = i * kWarp + lane_id();
        range_first[i] = p < cfg.ranks ? c.shared.base[cfg.experts + p] + cursors[cfg.experts + p] : 0;
    }
    __syncwarp();  // no -1 comes after a slot
    rank_entries(c, chunk, cursors);
#pragma unroll
    for (i32 i = 0; i < cfg.peers_per_lane(); ++i) {
        const i32 p = i * kWarp + lane_id();
        if (p < cfg.ranks) keep_range(c, chunk, p, range_first[i], c.shared.base[cfg.experts + p] + cursors[cfg.experts + p]);
    }
    __syncwarp();
}

// A repeat knows the rows; only the ranges are missing, because chunks may be of another size than then.
template <class Call>
MOECOMM_FN void range_chunk(const Call& c, i32 chunk) {
    constexpr DispatchConfig cfg = Call::cfg;
    const auto* slots = reinterpret_cast<const i32*>(c.a.route.token_slot);
    for (i32 p = lane_id(); p < cfg.ranks; p += kWarp) {
        i32 first = -1, count = 0;
#pragma unroll 8
        for (i32 token = chunk * c.a.chunk_tokens; token < c.chunk_end(chunk); ++token) {
            const i32 slot = slots[static_cast<i64>(token) * cfg.ranks + p];
            if (slot >= 0 && count++ == 0) first = slot;
        }
        keep_range(c, chunk, p, max(first, 0), max(first, 0) + count);
    }
}

// The chunks of this block, by the warps that have counted them, whose counters stand at what comes before.
template <class Call>
MOECOMM_FN void rank_share(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 warp = warp_id();
    if constexpr (cfg.repeat) {
        for (i32 chunk = c.share.first_chunk + warp; chunk < c.share.end_chunk; chunk += cfg.warps()) range_chunk(c, chunk);
    } else if (warp < c.count_warps()) {
        for (i32 chunk = c.counted_from(warp); chunk < c.counted_from(warp + 1); ++chunk) rank_chunk(c, chunk, c.counters(warp));
    }
    fence_async_shared();  // bulk loads write where the counters were
    __syncthreads();
}

}  // namespace moecomm
