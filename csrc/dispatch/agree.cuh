// Step 3: with everybody's notice and counts each rank decides, alone and alike, whether the round goes on and where every row goes.
#pragma once
#include "call.cuh"

namespace moecomm {

// The lane that has acquired the tag of a notice reads the rest.
template <class Call>
MOECOMM_FN bool await_notices(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    bool missing = false;
    if (warp_id() == 0) {
        for (i32 p = lane_id(); p < cfg.ranks && !missing; p += kWarp) {
            const u64 at = notice_at(c.window(), cfg.ranks, c.round.tag, p);
            u64 tag;
            missing = !wait_flag(c.round, Phase::notice, p, at, c.round.tag, tag);
            if (!missing) c.shared.notices[p] = read_notice(c.a.ctx, at);
        }
    }
    return !__syncthreads_or(missing);
}

// Of each column: the sum over all ranks, and over the ranks before us.
template <class Call>
MOECOMM_FN void sum_counts(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    for (i32 column = threadIdx.x; column < cfg.columns(); column += cfg.warps() * kWarp) {
        i32 total = 0, before = 0;
#pragma unroll 8
        for (i32 source = 0; source < cfg.ranks; ++source) {
            const i32 count = load_fresh(c.counts_of(source) + column);
            total += count;
            if (source < c.me()) before += count;
        }
        const bool expert = column < cfg.experts;
        (expert ? c.shared.total[column] : c.shared.flat_total[column - cfg.experts]) = total;
        (expert ? c.shared.base[column] : c.shared.flat_base[column - cfg.experts]) = before;
    }
    __syncthreads();
}

// A warp: where the groups of one rank begin, and how many rows it needs.
template <class Call>
MOECOMM_FN void place_groups(const Call& c, i32 rank) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i64 group_limit = batched_start(c.a.ctx.shape, 1);
    i64 rows = 0, too_many = 0;
    for (i32 first = 0; first < cfg.experts_here(); first += kWarp) {
        const i32 local = first + lane_id(), expert = rank * cfg.experts_here() + local;
        const bool inside = local < cfg.experts_here();
        const i32 count = inside ? c.shared.total[expert] : 0;
        const i64 aligned = cfg.layout == Layout::expert ? aligned_group(count, c.a.alignment) : 0;
        i64 sum = aligned;
#pragma unroll
        for (i32 distance = 1; distance < kWarp; distance *= 2) {
            const i64 below = __shfl_up_sync(kAllLanes, sum, distance);
            if (lane_id() >= distance) sum += below;
        }
        const i64 start = cfg.layout == Layout::batched ? batched_start(c.a.ctx.shape, local) : rows + sum - aligned;
        if (inside) c.shared.base[expert] += static_cast<i32>(start);
        if (inside && rank == c.me()) c.shared.filled[local] = static_cast<i32>(start) + count;
        const u32 over = __ballot_sync(kAllLanes, count > group_limit);
        if (over != 0 && too_many == 0) too_many = __shfl_sync(kAllLanes, count, __ffs(over) - 1);
        rows += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    if (lane_id() == 0) c.shared.needed[rank] = cfg.layout == Layout::batched ? too_many : rows;
}

// One thread: the first objection in the order of the ranks, notices before capacity.
template <class Call>
MOECOMM_FN Verdict judge(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const Notice* notices = c.shared.notices;
    for (i32 p = 0; p < cfg.ranks; ++p) {
        const Verdict verdict = judge_notice(notices[c.me()], notices[p], p, cfg.experts);
        if (verdict.failure != Failure::none) return verdict;
    }
    for (i32 p = 0; p < cfg.ranks && !cfg.repeat; ++p) {
        const bool batched = cfg.layout == Layout::batched;
        const i64 needed = cfg.layout == Layout::flat ? c.shared.flat_total[p] : c.shared.needed[p];
        const i64 limit = batched ? batched_start(c.a.ctx.shape, 1) : notices[p].max_rows;
        if (needed > limit) return {Failure::bad_input, batched ? Argument::batched : Argument::max_rows, p, limit, needed};
    }
    return {Failure::none, Argument::none, -1, 0, 0};
}

// Every thread of every block.  False when the round has failed; else shared.verdict says whether rows move.
template <class Call>
MOECOMM_FN bool agree(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    if (!await_notices(c)) return false;
    if constexpr (!cfg.repeat) {
        sum_counts(c);
        if constexpr (cfg.layout != Layout::flat) {
            for (i32 rank = warp_id(); rank < cfg.ranks; rank += cfg.warps()) place_groups(c, rank);
            __syncthreads();
        }
    }
    if (threadIdx.x == 0) {
        c.shared.verdict = judge(c);
        if (blockIdx.x == 0 && c.shared.verdict.failure != Failure::none) report_void(c.round, c.shared.verdict);
    }
    __syncthreads();
    return true;
}

}  // namespace moecomm
