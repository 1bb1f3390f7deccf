// Step 3: with all ranks' round headers and counts, each rank decides for itself, with the same result, whether the round goes on and where
// every row goes.
#pragma once
#include "sum_counts.cuh"

namespace moecomm {

// Called by a warp. Computes where the groups of one rank begin and how many rows the rank needs. A lane handles several neighboring
// groups, so that one scan over the lanes is enough: every block does this before any row can be placed. Cannot fail.
template <class Call>
MOECOMM_FN void place_groups(const Call& c, i32 rank) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr bool batched = cfg.layout == Layout::batched;
    constexpr ExpertRanges ranges = cfg.ranges();
    constexpr i32 each = ceil_div(ranges.most(), kWarp);
    const i32 group = batched_group(c.shared.headers[rank].max_rows, ranges.count(rank));
    const i32 first = lane_id() * each, groups = min(max(ranges.count(rank) - first, 0), each);
    i32* const base = c.shared.base + ranges.first(rank) + first;
    i32* const filled = rank == c.me() ? c.shared.filled + first : nullptr;
    i64 rows = 0, too_many = 0;
#pragma unroll 4
    for (i32 i = 0; i < each; ++i) {
        if (i >= groups) continue;
        const i32 count = c.shared.total[ranges.first(rank) + first + i];
        const i32 start = batched ? (first + i) * group : static_cast<i32>(rows);
        base[i] += start;
        if (filled != nullptr) filled[i] = start + count;
        if (cfg.layout == Layout::expert) rows += c.a.alignment == 1 ? count : aligned_group(count, c.a.alignment);
        if (count > group && too_many == 0) too_many = count;
    }
    if constexpr (batched) {
        const u32 over = __ballot_sync(kAllLanes, too_many != 0);
        rows = over != 0 ? __shfl_sync(kAllLanes, too_many, __ffs(over) - 1) : 0;
    } else {
        const i64 sum = sum_up_to_lane(rows);
        const i32 before = static_cast<i32>(sum - rows);
#pragma unroll 4
        for (i32 i = 0; i < each; ++i) {
            if (i >= groups) continue;
            base[i] += before;
            if (filled != nullptr) filled[i] += before;
        }
        rows = __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    if (lane_id() == 0) c.shared.needed[rank] = rows;
}

// Called by one thread. Checks that `rank` has room for its rows.
template <class Call>
MOECOMM_FN ValidationResult validate_rows(const Call& c, i32 rank) {
    constexpr DispatchConfig cfg = Call::cfg;
    const bool batched = cfg.layout == Layout::batched;
    const i32 published = c.shared.headers[rank].max_rows;
    const i64 needed = c.shared.needed[rank], limit = batched ? batched_group(published, cfg.ranges().count(rank)) : published;
    if (needed <= limit) return {Failure::none, Argument::none, -1, 0, 0};
    return {Failure::bad_input, batched ? batched_error(c.shape(), limit) : Argument::max_rows, rank, limit, needed};
}

// Called by one thread. Returns the n-th of 2 * ranks checks: first the header of each rank, then the rows of each rank.
template <class Call>
MOECOMM_FN ValidationResult validate_rank(const Call& c, i32 nth) {
    constexpr DispatchConfig cfg = Call::cfg;
    return nth < cfg.ranks ? validate_header(c.shared.headers[c.me()], c.shared.headers[nth], nth, c.named_experts())
                           : validate_rows(c, nth - cfg.ranks);
}

// Returns whether agree() found no error, so that rows move.
template <class Call>
MOECOMM_FN bool is_valid_round(const Call& c) {
    return c.shared.first_error == 2 * Call::cfg.ranks;
}

// Called by the team of every block. Waits for all headers and counts, validates the round, and computes final offsets; barriers of the
// team order them in shared memory. Returns false to all threads if a wait failed (the failure record is filled); is_valid_round() tells
// whether the round is valid.
template <class Call>
MOECOMM_FN bool agree(const Call& c) {
    MOECOMM_SPAN(agree, c.round, c.team_thread() == 0);
    constexpr DispatchConfig cfg = Call::cfg;
    bool in_time = true;
    if constexpr (cfg.domains() > 1) {
        in_time = await_tagged_words(c, c.team_thread(), c.kTeam);
        if (c.team_any(!in_time)) return false;
    }
    if constexpr (times_headers(cfg) && !cfg.repeat && cfg.ranks > kTimedInPolls) {
        if (blockIdx.x == 0 && c.team_thread() < cfg.ranks) time_header(c.round, c.team_thread());
    }
    if constexpr (!cfg.repeat) in_time = sum_counts(c);
    in_time = await_headers<times_headers(cfg)>(c.round, c.shared.headers, c.kTeam - 1 - c.team_thread(), c.kTeam) && in_time;
    if (c.team_any(!in_time)) return false;
    const auto record_error = [&](i32 nth) {
        if (validate_rank(c, nth).failure != Failure::none) atomicMin(&c.shared.first_error, nth);
    };
    if constexpr (!cfg.repeat) finish_counts(c);
    if constexpr (!cfg.repeat && cfg.layout != Layout::flat) {
        for (i32 rank = c.team_warp(); rank < cfg.ranks; rank += c.kTeamWarps) place_groups(c, rank);
        __syncwarp();
    }
    // A warp validates the ranks whose groups it placed, a lane for each.
    for (i32 rank = c.team_warp() + lane_id() * c.kTeamWarps; rank < cfg.ranks; rank += kWarp * c.kTeamWarps) {
        if constexpr (!cfg.repeat && cfg.layout == Layout::flat) c.shared.needed[rank] = c.shared.total[cfg.experts + rank];
        record_error(rank);
        if constexpr (!cfg.repeat) record_error(cfg.ranks + rank);
        const RoundHeader& from = c.shared.headers[rank];
        c.shared.sources[rank] = {from.num_tokens, from.chunk_tokens, from.blocks, from.dispatch.token_packet_bytes != 0};
    }
    c.team_any(false);
    if (!is_valid_round(c) && blockIdx.x == 0 && c.team_thread() == 0) report_invalid(c.round, validate_rank(c, c.shared.first_error));
    return true;
}

}  // namespace moecomm
