// Small outputs that are known before any row has moved.
#pragma once
#include "call.cuh"

namespace moecomm {

// Count the rows of a dispatch (csrc/protocol/counters.h). Called by one warp of the rank after the round was found valid; the counts of
// all ranks have arrived as tagged words. A repeat has none, and counts the rows of the dispatch that it repeats. Relaxed adds; cannot
// fail.
template <class Call>
MOECOMM_FN void count_rows(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const u64 bytes = static_cast<u64>(cfg.row_bytes + cfg.scale_bytes);
    i32 *const from = traffic_of(c.a.route, cfg.ranks), *const to = from + cfg.ranks;
    const auto count_of = [&](i32 source, i32 column) {
        return static_cast<i32>(signal_word(load_relaxed(own<const u64>(c.a.ctx, tagged_word(c.round, source, kHeaderWords + column)))));
    };
#pragma unroll 1
    for (i32 p = lane_id(); p < cfg.ranks; p += kWarp) {
        if constexpr (!cfg.repeat) {
            from[p] = count_of(p, cfg.experts + c.me());
            to[p] = count_of(c.me(), cfg.experts + p);
        }
        const u64 in = static_cast<u32>(from[p]), out = static_cast<u32>(to[p]);
        add_counter(c.a.ctx, Counter::rows_from, p, in);
        add_counter(c.a.ctx, Counter::rows_to, p, out);
        add_counter(c.a.ctx, Counter::bytes_from, p, in * bytes);
        add_counter(c.a.ctx, Counter::bytes_to, p, out * bytes);
    }
#pragma unroll 1
    for (i32 e = lane_id(); e < c.experts_here(); e += kWarp) {
        const i32 rows = cfg.repeat ? reinterpret_cast<const i32*>(c.a.tokens_per_expert)[e] : c.shared.total[c.first_expert() + e];
        add_counter(c.a.ctx, Counter::expert_rows, e, static_cast<u32>(rows));
    }
}

// Called by the send warps of one block after the round was found valid. Writes the counts for the caller, the tokens that each source
// sent, and what the second kernel of a split dispatch waits for; seals the route. With `counts`, the last of these warps counts rows.
// Cannot fail.
template <bool counts = true, class Call>
MOECOMM_FN void write_counts(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    State* state = own_state(c.a.ctx);
    if (threadIdx.x == 0) state->last_dispatch = c.round.tag;
    if (counts && warp_id() == cfg.send_warps - 1) count_rows(c);
    if constexpr (cfg.repeat) return;
    if (threadIdx.x == 0) {
        round_of(c.a.route, cfg.ranks) = c.round.tag;
        seal_of(c.a.route, cfg.ranks) = kernel_seal(c.a.route);
    }
    const i32 me = c.me(), here = c.experts_here();
    const i32* total = c.shared.total + c.first_expert();
    auto* tokens = reinterpret_cast<i32*>(c.a.tokens_per_expert);
    auto* rows_of = reinterpret_cast<i64*>(c.a.rows_per_expert);
    auto* sent = reinterpret_cast<SourceTokens*>(c.a.route.sent);
#pragma unroll 1
    for (i32 e = threadIdx.x; e < here; e += cfg.send_warps * kWarp) {
        tokens[e] = total[e];
        rows_of[e] = cfg.layout == Layout::expert ? aligned_group(total[e], c.a.alignment) : total[e];
    }
#pragma unroll 1
    for (i32 p = threadIdx.x; p < cfg.ranks; p += cfg.send_warps * kWarp)
        sent[p] = {c.shared.sources[p].num_tokens, c.shared.sources[p].chunk_tokens};
    if (threadIdx.x >= kWarp) return;
    i32 rows = static_cast<i32>(c.shared.needed[me]);
    if constexpr (cfg.layout == Layout::batched) {
        rows = 0;
        for (i32 e = lane_id(); e < here; e += kWarp) rows += total[e];
        rows = static_cast<i32>(__reduce_add_sync(kAllLanes, static_cast<u32>(rows)));
    }
    if (threadIdx.x == 0) *reinterpret_cast<i32*>(c.a.num_rows) = rows;
}

// Called by the send warps of all blocks, a warp for each group. Clears the metadata of padding: the rows between the last row of a group
// and the next group. Cannot fail.
template <class Call>
MOECOMM_FN void clear_padding(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    if (cfg.repeat || cfg.layout != Layout::expert || c.a.alignment == 1) return;
    auto* src = c.transport.template local<int2>(c.a.out_src);
    auto* weights = c.transport.template local<float>(c.a.out_weights);
    for (i32 e = blockIdx.x + gridDim.x * warp_id(); e < c.experts_here(); e += gridDim.x * cfg.send_warps) {
        const i32 filled = c.shared.filled[e], count = c.shared.total[c.first_expert() + e];
        const i32 end = filled - count + aligned_group(count, c.a.alignment);
#pragma unroll 1
        for (i32 row = filled + lane_id(); row < end; row += kWarp) {
            if (c.a.out_src != 0) src[row] = make_int2(-1, -1);
            if (c.a.out_weights != 0) weights[row] = 0.0f;
        }
    }
}

// Called by `threads` threads that have no other work, as the `thread`-th of them. Marks unused flat rows from `first` on with expert -1
// and weight 0, where the caller asked for it (clear_rows). This may be as many bytes as peers write. Cannot fail.
template <class Call>
MOECOMM_FN void clear_unused(const Call& c, i64 first, i32 thread, i32 threads) {
    constexpr DispatchConfig cfg = Call::cfg;
    if constexpr (cfg.repeat || cfg.layout != Layout::flat) return;
    const i64 end = static_cast<i64>(c.a.clear_rows) * cfg.topk;
#pragma unroll 1
    for (i64 at = first * cfg.topk + thread; at < end; at += threads) {
        if constexpr (cfg.idx_bytes == 8) c.transport.template local<i64>(c.a.out_topk_idx)[at] = -1;
        if constexpr (cfg.idx_bytes == 4) c.transport.template local<i32>(c.a.out_topk_idx)[at] = -1;
        c.transport.template local<float>(c.a.out_weights)[at] = 0.0f;
    }
}

// Called by all threads of all blocks in an invalid round, in which no row has moved. Clears counts and route; each block clears its own
// share, which it has already written. A repeat keeps the route, which belongs to an earlier dispatch. Cannot fail.
template <class Call>
MOECOMM_FN void clear_route(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 thread = blockIdx.x * cfg.threads() + threadIdx.x, threads = gridDim.x * cfg.threads();
    if (thread == 0) own_state(c.a.ctx)->last_dispatch = 0;
    if constexpr (cfg.repeat) return;
    const Route& route = c.a.route;
    const auto forget = [&](u64 address, i64 words) {
#pragma unroll 1
        for (i64 i = c.share.first * words + threadIdx.x; i < c.share.end * words; i += cfg.threads())
            reinterpret_cast<i32*>(address)[i] = -1;
    };
    forget(route.token_rows, cfg.topk);
    forget(route.token_owner, cfg.topk);
    forget(route.token_slot, cfg.ranks);
#pragma unroll 1
    for (i32 e = thread; e < c.experts_here(); e += threads) {
        reinterpret_cast<i32*>(c.a.tokens_per_expert)[e] = 0;
        reinterpret_cast<i64*>(c.a.rows_per_expert)[e] = 0;
    }
    if (thread == 0) *reinterpret_cast<i32*>(c.a.num_rows) = 0;
    if (thread == 0) {
        round_of(route, cfg.ranks) = c.round.tag;
        seal_of(route, cfg.ranks) = kernel_seal(route);
    }
    clear_unused(c, 0, thread, threads);
#pragma unroll 1
    for (i32 p = thread; p < cfg.ranks; p += threads) {
        reinterpret_cast<SourceTokens*>(route.sent)[p] = {0, 1};
        traffic_of(route, cfg.ranks)[p] = traffic_of(route, cfg.ranks)[cfg.ranks + p] = 0;
    }
}

}  // namespace moecomm
