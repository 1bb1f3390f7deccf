// Direct rows: rows for a source rank of another domain that has few tokens are put there without a forwarder (csrc/protocol/domains.h).
#pragma once
#include "call.cuh"

namespace moecomm {

// Called by all lanes of a warp once source ranks have been looked up. True if direct rows leave before the headers of other ranks have
// come, as in a dispatch (csrc/dispatch/scaleout_early.cuh), from places of their own; two domains have enough. Not if weights come with
// the headers, or if a chunk of any source rank has to wait for a place among staged rows: that rank gives it when its pull warps have the
// headers, which may wait for return-forward warps.
template <class Call>
MOECOMM_FN bool leaves_early(const Call& c) {
    if (Call::cfg.domains() != 2 || Call::cfg.own_weights || c.shared.mine.status != static_cast<u32>(Argument::none)) return false;
    bool waits = false;
    if constexpr (!Call::cfg.in_place) {
        for (i32 p = lane_id(); p < Call::cfg.ranks; p += kWarp)
            waits = waits || c.chunks_of(p) > ring_chunks(c.shape(), c.shared.sent[p].chunk_tokens);
    }
    return !__any_sync(kAllLanes, waits);
}

// Called by each reduce warp. Unless rows leave early, waits until pull and return-forward warps of the block have received all tagged
// words; no rank waits for a peer before it sends these. Needed before direct rows are staged, because puts of the previous combine from
// the same places have then completed, and before weights are read that other domains put ahead of their tagged words. Returns false in all
// lanes on failure; the failure record is filled.
template <class Call>
MOECOMM_FN bool await_headers_seen(const Call& c) {
    bool wanted = Call::cfg.own_weights;
    for (i32 source_rank = 0; source_rank < Call::cfg.ranks; ++source_rank) wanted = wanted || c.direct_to(source_rank);
    if (!wanted || c.leaves_early) return true;
    const volatile u32& headers_seen = c.scaleout().headers_seen;
    bool in_time = true;
    if (lane_id() == 0) in_time = wait_for(c.round, Phase::grid, c.me(), 1, [&] { return headers_seen != 0; }, [] { return 0ll; });
    in_time = __all_sync(kAllLanes, in_time);
    asm volatile("fence.acq_rel.cta;" ::: "memory");  // acquire is_invalid, and what arrived before the tagged words
    return in_time;
}

// Called by all lanes of a return-forward warp. Waits until a chunk is staged (acquire) unless rows are read in place, puts its rows to
// `source_rank`, then signals. Returns false in all lanes if a wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN bool put_chunk(const Call& c, i32 warp, i32 source_rank, i32 chunk) {
    constexpr CombineConfig cfg = Call::cfg;
    const auto* ranges = reinterpret_cast<const u32*>(c.a.route.ranges) + static_cast<i64>(source_rank) * c.shape().max_tokens;
    const u64 range = ranges[chunk];
    if (signal_count(range) == 0) return true;
    if constexpr (!cfg.in_place) {
        const auto* flag = own<const u64>(c.a.ctx, c.staged_flag(source_rank, chunk));
        const u64 staged = word_signal(c.round.tag, chunk);
        bool in_time = true;
        if (lane_id() == 0)
            in_time = wait_for(
                c.round, Phase::grid, c.me(), chunk, [&] { return load_acquire(flag) == staged; },
                [&] { return static_cast<i64>(signal_word(load_acquire(flag))); });
        if (!__all_sync(kAllLanes, in_time)) return false;
    }
    const auto channel = c.put_channel(warp);
    const i64 bytes = c.a.weight_grads != 0 ? c.shape().staged_row_bytes : align_up<i64>(cfg.staged_bytes(), 16);
    for (i32 slot = signal_first(range); slot < signal_first(range) + signal_count(range); ++slot) {
        i32 row = slot;
        if constexpr (cfg.layout != Layout::flat) {  // the first of the token's rows here
            const i32 mine =
                lane_id() < cfg.topk ? reinterpret_cast<const i32*>(c.a.route.rows)[static_cast<i64>(slot) * cfg.topk + lane_id()] : -1;
            row = __shfl_sync(kAllLanes, mine, __ffs(__ballot_sync(kAllLanes, mine >= 0)) - 1);
        }
        const i32 token = reinterpret_cast<const int2*>(c.a.route.src)[row].y;
        u64 from = c.reduced_row_at(source_rank, token);
        if constexpr (cfg.in_place) from = c.a.y - c.a.ctx.peers[c.me()] + slot * static_cast<u64>(c.a.y_stride);
        const u64 to = direct_row_at(c.window(), c.shape(), c.round.tag, c.me(), token);
        if (!put_ahead(c, channel, Phase::reduced, source_rank, to, from, bytes)) return false;
    }
    channel.settle();
    // Each chunk with rows here adds 1 to the signal; the first adds the rest, so that the signal is complete when all have
    // (signal_direct).
    i32 parts = 0, first = -1;
    for (i32 base = 0; base < c.chunks_of(source_rank); base += kWarp) {
        const i32 other = base + lane_id();
        const u32 some = __ballot_sync(
            kAllLanes, other < c.chunks_of(source_rank) && signal_count(ranges[min(other, c.chunks_of(source_rank) - 1)]) != 0);
        if (first < 0 && some != 0) first = base + __ffs(some) - 1;
        parts += __popc(some);
    }
    bool signaled = true;
    if (lane_id() == 0) signaled = signal_direct(c, channel, Phase::reduced, source_rank, parts, chunk == first);
    return __all_sync(kAllLanes, signaled);
}

// Called by each return-forward warp; the warps of the grid divide all direct chunks. Returns false if a wait failed; the failure record is
// filled.
template <class Call>
MOECOMM_FN bool put_direct(const Call& c, i32 warp) {
    constexpr CombineConfig cfg = Call::cfg;
    constexpr i32 scaleout_ranks = cfg.ranks - cfg.scaleup_ranks();
    const auto source_rank_of = [&](i32 n) { return (c.domains().first() + cfg.scaleup_ranks() + n) % cfg.ranks; };
    i32 most = 0;
    for (i32 n = 0; n < scaleout_ranks; ++n)
        if (c.direct_to(source_rank_of(n))) most = max(most, c.chunks_of(source_rank_of(n)));
    for (i32 item = blockIdx.x + gridDim.x * warp; item < most * scaleout_ranks; item += gridDim.x * cfg.return_forward_warps) {
        const i32 source_rank = source_rank_of(item % scaleout_ranks), chunk = item / scaleout_ranks;
        if (c.direct_to(source_rank) && chunk < c.chunks_of(source_rank) && !put_chunk(c, warp, source_rank, chunk)) return false;
    }
    return true;
}

}  // namespace moecomm
