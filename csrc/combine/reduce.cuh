// Step 2: reduces this rank's rows of each token to one, in float32 and in the order of k; a flat row is copied, because the caller has
// already reduced it. The source rank pulls the reduced row from a place of its own (CombineArgs::reduced_rows) or from the staging ring.
#pragma once
#include "scaleout/direct.cuh"
#include "weights.cuh"
#include "work_list.cuh"

namespace moecomm {

// A part of a reduced row: the same columns of one or two of its entries, on their way into registers.
template <class Call>
struct Step {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr i32 kEntries = cfg.layout == Layout::flat ? 1 : 2;  // a flat row is copied
    // Vectors of 16 bytes in each lane, of each entry. One where rows are short, or where most rows travel in packets instead.
    static constexpr i32 kVectors = cfg.packets || cfg.row_bytes() <= 16 * kWarp ? 1 : 4 / kEntries;
    uint4 held[kEntries][kVectors];
    float weight[kEntries];
    u8* to;       // where this lane stores its sum; null: no step
    u32 has;      // one bit for each of this lane's vectors that lies within the row
    bool both;    // there is a second entry
    bool single;  // the row's only entry travels as it is
    bool last;    // these are the last entries of these columns
    i32 through;  // the last work-list step that this warp completes with it; -1: none
};

// The role of a reduce warp: reduces every reduce_warps-th row in the work items of the block, piece by piece, with two steps in flight.
// The entries of a row are looked up during the row before it, and what depends on them one piece later, because each lookup waits for
// memory. All lanes call all methods together.
template <class Call>
struct Reduce {
    static constexpr CombineConfig cfg = Call::cfg;
    using Step = moecomm::Step<Call>;
    static constexpr bool kWeighted = cfg.weighted && cfg.layout != Layout::flat, kSingles = cfg.single_rows_travel();
    static constexpr i32 kColumns = columns_in_16(cfg.type), kPieceColumns = Step::kVectors * kWarp * kColumns;
    static constexpr i32 kPieces = ceil_div(cfg.hidden, kPieceColumns);

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
    Row now, next;      // `now` is being loaded
    i32 piece = 0;      // piece of `now`
    u32 left = 0;       // lanes whose entries of the piece are still to be loaded; 0: the piece has not begun
    u8* row = nullptr;  // destination of `now`, null before begin_row
    i32 placed = -1;    // the work item whose place in the ring is free
    i32 signaled = 0;   // work items at whose steps this warp has arrived
    bool failed = false;
    float sum[Step::kVectors][kColumns];

    MOECOMM_FN explicit Reduce(const Call& call) : c(call), work_list(call) {
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
    MOECOMM_FN void go_on() {
        now = next;
        if constexpr (kPieces == 1) look_up(now);
        next = find();
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
                in_time = may_wait && wait_for(c.round, Phase::drained, c.domains().local(work.source_rank), before, given,
                                               [&] { return static_cast<i64>(signal_word(load_acquire(place))); });
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

    // Starts the row `now`. Blocks only if `may_wait`, when this warp holds no open step; this rules out circular waits.
    MOECOMM_FN bool begin_row(bool may_wait) {
        bool here = await_place(may_wait);
        if constexpr (cfg.own_weights) here = here && await_weights(may_wait);
        if (!here) {
            failed = may_wait;
            return false;
        }
        row = c.has_reduced_rows() ? reinterpret_cast<u8*>(c.a.reduced_rows) + row_index() * c.reduced_row_pitch()
                                   : c.staged_row(c.me(), work_list.source_rank(now.step), row_index());
        if constexpr (kSingles) {
            const u32 named = __ballot_sync(kAllLanes, now.entry >= 0);
            if (__popc(named) == 1 && now.entry >= 0) *reinterpret_cast<float*>(row + cfg.row_bytes()) = kWeighted ? now.weight : 1.0f;
        }
        if (c.a.weight_grads != 0) stage_grads(now.entry);
        return true;
    }

    // Starts to load the next step; `s.to` is null if there is none, or if it would block.
    MOECOMM_FN void load(Step& s, bool may_wait) {
        s.to = nullptr;
        if (failed || now.step == work_list.steps) return;
        const u32 named = __ballot_sync(kAllLanes, now.entry >= 0);
        if (left == 0) {
            if (row == nullptr && !begin_row(may_wait)) return;
            left = named;
        }
        s.single = kSingles && __popc(named) == 1;
        s.to = row + column() * bytes_of(s.single ? cfg.type : cfg.staged());
#pragma unroll
        for (i32 i = 0; i < Step::kEntries; ++i) {
            if (i == 1) s.both = left != 0;
            if (i == 0 || s.both) load_entry(s, i);
        }
        s.last = left == 0;
        s.through = -1;
        if (!s.last) return;
        s.has = 0;
#pragma unroll
        for (i32 v = 0; v < Step::kVectors; ++v) s.has |= has(v) << v;
        if (piece == 0 && kPieces > 1) look_up(next);
        if (++piece < kPieces) return;
        piece = 0;
        if (next.step > now.step) s.through = next.step - 1;
        row = nullptr;
        go_on();
    }
    MOECOMM_FN i32 column() const { return piece * kPieceColumns + lane_id() * kColumns; }  // this lane's first
    // True if this lane has columns in a vector of the piece.
    MOECOMM_FN bool has(i32 v) const { return cfg.hidden % kPieceColumns == 0 || column() + v * kWarp * kColumns < cfg.hidden; }
    MOECOMM_FN void load_entry(Step& s, i32 i) {
        const i32 lane = __ffs(left) - 1;
        left &= left - 1;
        const i32 entry = __shfl_sync(kAllLanes, now.entry, lane);
        if constexpr (kWeighted) s.weight[i] = __shfl_sync(kAllLanes, now.weight, lane);
        const u8* from = reinterpret_cast<const u8*>(c.a.y) + entry * c.a.y_stride + column() * bytes_of(cfg.type);
#pragma unroll
        for (i32 v = 0; v < Step::kVectors; ++v)
            if (has(v)) s.held[i][v] = reinterpret_cast<const uint4*>(from)[v * kWarp];
    }

    // Multiplies, then adds, each rounded: not a fused multiply-add.
    MOECOMM_FN void add(const Step& s, i32 i) {
#pragma unroll
        for (i32 v = 0; v < Step::kVectors; ++v) {
            float columns[kColumns];
            widen<cfg.type>(s.held[i][v], columns);
#pragma unroll
            for (i32 k = 0; k < kColumns; ++k)
                sum[v][k] = __fadd_rn(sum[v][k], kWeighted ? __fmul_rn(s.weight[i], columns[k]) : columns[k]);
        }
    }
    MOECOMM_FN void finish(const Step& s) {
        if constexpr (Step::kEntries == 1) {
            store(s, [&](i32 v) { *reinterpret_cast<uint4*>(s.to + v * kWarp * 16) = s.held[0][v]; });
        } else if (kSingles && s.single) {
            store(s, [&](i32 v) { *reinterpret_cast<uint4*>(s.to + v * kWarp * 16) = s.held[0][v]; });
        } else {
            add(s, 0);
            if (s.both) add(s, 1);
            if (!s.last) return;
            store(s, [&](i32 v) { store_columns<cfg.staged()>(s.to + v * kWarp * kColumns * bytes_of(cfg.staged()), sum[v]); });
            clear();
        }
        pass(s.through);
    }
    template <class Put>
    MOECOMM_FN void store(const Step& s, const Put& put) {
#pragma unroll
        for (i32 v = 0; v < Step::kVectors; ++v)
            if ((s.has >> v & 1) != 0) put(v);
    }
    MOECOMM_FN void clear() {
#pragma unroll
        for (i32 v = 0; v < Step::kVectors; ++v)
#pragma unroll
            for (i32 k = 0; k < kColumns; ++k) sum[v][k] = 0.0f;
    }

    // Runs the role. Returns false if a place did not become free or a weight did not arrive; the failure record is filled.
    MOECOMM_FN bool run() {
        pass(now.step - 1);
        clear();
        Step one, other;
        load(one, true);
        load(other, one.to == nullptr);
        while (one.to != nullptr || other.to != nullptr) {
            if (one.to != nullptr) finish(one);
            load(one, other.to == nullptr);
            if (other.to != nullptr) finish(other);
            load(other, one.to == nullptr);
        }
        return !failed;
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

// Called by each reduce warp. Returns false if a wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN bool reduce(const Call& c) {
    if constexpr (Call::cfg.domains() > 1) {
        if (!await_headers_seen(c)) return false;
    }
    return Reduce<Call>(c).run();
}

}  // namespace moecomm
