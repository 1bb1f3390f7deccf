// The rows that a reduce warp reduces, in the order of the block's work list: their entries, weights and places, and the signals that they
// are staged. Reduce (reduce.cuh) and ReduceThroughRing (reduce_ring.cuh) add them up.
#pragma once
#include "weights.cuh"
#include "work_list.cuh"

namespace moecomm {

// State of one reduce warp, which has every reduce_warps-th row in the work items of the block. All lanes call all methods together.
template <class Call>
struct RowsToReduce {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr bool kWeighted = cfg.weighted && cfg.layout != Layout::flat, kSingles = cfg.single_rows_travel();

    struct Row {
        i32 step;      // position of its work item in the work list; work_list.steps: no row
        i32 entry;     // this lane's row of y, -1: none
        i32 of;        // in the lane of its first entry: the token at its source rank; with reduced_rows, the flat row
        float weight;  // weight of the entry
    };

    const Call& c;
    const WorkList<Call> work_list;
    // The search for rows continues at row `at` of the work item `step`. Lane i holds the range of flat rows of the i-th of 32 work items.
    i32 step = 0, at = warp_id();
    u32 ranges;
    Row now, next;      // `now` is being reduced
    i32 piece = 0;      // the next piece of `now`
    u32 left = 0;       // Reduce: lanes whose entries of the piece are still to be loaded; 0: the piece has not begun
    u8* row = nullptr;  // destination of `now`, null before begin_row
    i32 placed = -1;    // the work item whose place in the ring is free
    i32 signaled = 0;   // work items at whose steps this warp has arrived
    bool failed = false;

    // Finds the first two rows, and loads what depends on the entries of the first.
    MOECOMM_FN explicit RowsToReduce(const Call& call) : c(call), work_list(call) {
        ranges = range_of(lane_id());
        now = find();
        look_up(now);
        next = find();
    }

    // Returns the flat rows of a work item as the low word of a chunk signal; 0 if it has none.
    MOECOMM_FN u32 range_of(i32 nth_step) const {
        if (nth_step >= work_list.steps) return 0;
        const Work work = work_list[nth_step];
        if (work.chunk < 0) return 0;
        return reinterpret_cast<const u32*>(c.a.route.ranges)[static_cast<i64>(work.source_rank) * c.shape().max_tokens + work.chunk];
    }

    // Finds this warp's next row and starts to load its entries.
    MOECOMM_FN Row find() {
        u32 range = 0;
        for (; step < work_list.steps; next_step()) {
            range = __shfl_sync(kAllLanes, ranges, step % kWarp);
            if (at < signal_count(range)) break;
            at -= signal_count(range);
        }
        const i32 slot = signal_first(range) + at;
        Row row{step, -1, slot, 0.0f};
        if (step == work_list.steps) return row;
        at += cfg.reduce_warps;
        if constexpr (cfg.layout == Layout::flat) {
            if (lane_id() == 0) row.entry = slot;
        } else {
            if (lane_id() < cfg.topk)
                row.entry = reinterpret_cast<const i32*>(c.a.route.rows)[static_cast<i64>(slot) * cfg.topk + lane_id()];
        }
        return row;
    }
    MOECOMM_FN void next_step() {
        if (++step % kWarp != 0) return;
        ranges = range_of(step + lane_id());
    }
    // Loads the token and weights of a row, which depend on its entries.
    MOECOMM_FN void look_up(Row& row) const {
        if (row.entry < 0) return;
        if (!c.has_reduced_rows()) row.of = reinterpret_cast<const int2*>(c.a.route.src)[row.entry].y;
        if constexpr (kWeighted && !cfg.own_weights) row.weight = reinterpret_cast<const float*>(c.a.route.row_weights)[row.entry];
    }

    // Returns whether the place of the work item in the ring is free: the source rank has pulled the chunk that held it before (acquire).
    // Asked only where this rank has rows of the work item, so the source rank, which needs these rows, cannot be further ahead.
    MOECOMM_FN bool await_place(bool may_wait) {
        if (placed == now.step || c.has_reduced_rows()) return true;
        const Work work = work_list[now.step];
        const i32 before = work.chunk - ring_chunks(c.shape(), work.chunk_tokens);
        if (before >= 0) {
            const u64 credit = word_signal(c.round.tag, before);
            const auto* place =
                c.transport.template local<const u64>(credit_at(c.window(), c.shape(), work.source_rank, before, work.chunk_tokens));
            const volatile i32& is_invalid = c.shared.is_invalid;  // in an invalid round nobody pulls
            const auto given = [&] { return load_acquire(place) == credit || is_invalid != 0; };
            bool in_time = true;
            if (lane_id() == 0 && !given()) {
                in_time = may_wait && wait_for(c.round, Phase::drained, c.shared.forwarders.local(c.domains(), work.source_rank), before,
                                               given, [&] { return static_cast<i64>(signal_word(load_acquire(place))); });
            }
            if (!__all_sync(kAllLanes, in_time)) return false;
        }
        placed = now.step;
        return true;
    }

    // Row::of of the current row, in all lanes.
    MOECOMM_FN i32 row_index() const { return __shfl_sync(kAllLanes, now.of, __ffs(__ballot_sync(kAllLanes, now.entry >= 0)) - 1); }

    // Loads the weights of the row's entries; returns whether they have arrived. A source rank posts them before it waits for anything; one
    // in another domain puts them before its tagged words, which have arrived (await_headers_seen).
    MOECOMM_FN bool await_weights(bool may_wait) {
        const i32 token = row_index(), source_rank = work_list.source_rank(now.step);
        u64 word = 0;
        const auto here = [&] { return is_weight_here(c, source_rank, token, word); };
        bool in_time = true;
        if (now.entry >= 0 && !here())
            in_time = may_wait &&
                      wait_for(c.round, Phase::header, source_rank, c.round.tag, here, [&] { return static_cast<i64>(signal_tag(word)); });
        now.weight = weight_in(word);
        return __all_sync(kAllLanes, in_time);
    }

    // Starts the row `now`. Blocks only if `may_wait`, when this warp holds no unfinished row; this rules out circular waits.
    MOECOMM_FN bool begin_row(bool may_wait) {
        bool here = await_place(may_wait);
        if constexpr (cfg.own_weights) here = here && await_weights(may_wait);
        if (!here) {
            failed = may_wait;
            return false;
        }
        if constexpr (cfg.domains() > 1) {
            row = c.transport.template local<u8>(c.reduced_row_at(work_list.source_rank(now.step), row_index()));
        } else {
            row = c.has_reduced_rows() ? reinterpret_cast<u8*>(c.a.reduced_rows) + row_index() * c.reduced_row_pitch()
                                       : c.staged_row(c.me(), work_list.source_rank(now.step), row_index());
        }
        if constexpr (kSingles) {
            const u32 named = __ballot_sync(kAllLanes, now.entry >= 0);
            if (__popc(named) == 1 && now.entry >= 0) *reinterpret_cast<float*>(row + cfg.row_bytes()) = kWeighted ? now.weight : 1.0f;
        }
        if (c.a.weight_grads != 0) stage_grads(now.entry);
        return true;
    }

    MOECOMM_FN void stage_grads(i32 entry) const {
        if constexpr (cfg.layout == Layout::flat) entry = __shfl_sync(kAllLanes, entry, 0);
        if (lane_id() >= cfg.topk) return;
        const auto* grads = reinterpret_cast<const float*>(c.a.weight_grads);
        float grad;
        if constexpr (cfg.layout == Layout::flat) {
            grad = grads[static_cast<i64>(entry) * cfg.topk + lane_id()];
        } else {
            grad = entry >= 0 ? grads[entry] : 0.0f;
        }
        reinterpret_cast<float*>(row + (c.has_reduced_rows() ? c.reduced_row_pitch() - cfg.grads_bytes() : c.grads_at()))[lane_id()] = grad;
    }

    // Arrives at the steps of all work items up to `last`. Without a flag warp, the warp that arrives last signals the work item.
    MOECOMM_FN void pass(i32 last) {
        for (; signaled <= last; ++signaled) {
            if constexpr (cfg.flag_warps > 0) {
                __syncwarp();  // all lanes have stored
                if (lane_id() == 0) c.shared.staged.arrive(c.round, signaled);
            } else if (complete_step(c.shared.staged, c.round, signaled) && lane_id() == 0) {
                work_list.signal(signaled);
            }
        }
    }
};

}  // namespace moecomm
