// Step 5: every chunk of every rank is awaited; where a token has several rows here, the one that came is copied to the others.
#pragma once
#include "call.cuh"

namespace moecomm {

// Chunks of all ranks, the first of each before the second of any: item i is chunk i / ranks of the rank i % ranks places after ours.
template <class Call>
MOECOMM_FN i32 incoming_items(const Call& c) {
    i32 most = 0;
    for (i32 s = 0; s < Call::cfg.ranks; ++s) most = max(most, ceil_div(c.shared.notices[s].num_tokens, c.shared.notices[s].chunk_tokens));
    return most * Call::cfg.ranks;
}

// False when it did not come.  `range` is 0 for an item that does not exist.
template <class Call>
MOECOMM_FN bool await_chunk(const Call& c, i32 item, u64& range) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 source = rotated<cfg.ranks>(c.me(), item % cfg.ranks), chunk = item / cfg.ranks;
    const Notice& from = c.shared.notices[source];
    range = 0;
    if (chunk >= ceil_div(from.num_tokens, from.chunk_tokens)) return true;
    return wait_flag(c.round, Phase::payload, source, arrived_at(c.window(), source, chunk), c.round.tag, range);
}

// The rows of one token here, in the lanes of `present`: the first has come, the others are copies of it.
template <class Call>
MOECOMM_FN void spread_row(const Call& c, i32 row, u32 present) {
    constexpr DispatchConfig cfg = Call::cfg;
    const u32 others = present & (present - 1);
    if (others == 0) return;
    u8* x = c.transport.template local<u8>(c.a.out_x);
    u8* scales = c.transport.template local<u8>(c.a.out_scales);
    const auto row_of = [&](i32 lane) { return static_cast<i64>(__shfl_sync(kAllLanes, row, lane)); };
    const i64 from = row_of(__ffs(present) - 1);
    copy_row<cfg.row_bytes>(x + from * cfg.row_bytes, others, [&](i32 lane) { return x + row_of(lane) * Call::cfg.row_bytes; });
    if constexpr (cfg.scale_bytes > 0) {
        for (u32 left = others; left != 0; left &= left - 1)
            copy_small<cfg.scale_bytes>(scales + row_of(__ffs(left) - 1) * cfg.scale_bytes, scales + from * cfg.scale_bytes);
    }
}

// Of the flat rows [first, first + count) every receive_warps-th, as many at once as their entries fit the lanes.
template <class Call>
MOECOMM_FN void spread_rows(const Call& c, i32 warp, i32 first, i32 count) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 step = cfg.tokens_per_step() * cfg.receive_warps;
    constexpr u32 one_token = kAllLanes >> (kWarp - cfg.topk);
    const auto* rows = reinterpret_cast<const i32*>(c.a.route.rows);
    const i32 nth = lane_id() / cfg.topk, k = lane_id() % cfg.topk;
    for (i32 at = warp; at < count; at += step) {
        const i32 mine = at + nth * cfg.receive_warps;
        const bool inside = nth < cfg.tokens_per_step() && mine < count;
        const i32 row = inside ? load_fresh(rows + static_cast<i64>(first + mine) * cfg.topk + k) : -1;
        const u32 present = __ballot_sync(kAllLanes, row >= 0);
        for (i32 i = 0; i < cfg.tokens_per_step(); ++i) spread_row(c, row, present & (one_token << (i * cfg.topk)));
    }
}

// By each receive warp, while the send warps of the block send.  Chunks are strided over the blocks, their rows over the warps.
template <class Call>
MOECOMM_FN bool receive(const Call& c) {
    const i32 warp = warp_id() - Call::cfg.send_warps, items = incoming_items(c);
    for (i32 item = blockIdx.x; item < items; item += gridDim.x) {
        u64 range = 0;
        const bool missing = lane_id() == 0 && !await_chunk(c, item, range);
        if (__any_sync(kAllLanes, missing)) return false;  // after this barrier the other lanes too may read what the flag covers
        range = __shfl_sync(kAllLanes, range, 0);
        spread_rows(c, warp, signal_first(range), signal_count(range));
    }
    return true;
}

// Flat: rows are where they belong when they arrive.  By all threads.
template <class Call>
MOECOMM_FN bool await_all(const Call& c) {
    const i32 items = incoming_items(c), threads = gridDim.x * Call::cfg.warps() * kWarp;
    for (i32 item = blockIdx.x + gridDim.x * threadIdx.x; item < items; item += threads) {
        u64 range;
        if (!await_chunk(c, item, range)) return false;
    }
    return true;
}

}  // namespace moecomm
