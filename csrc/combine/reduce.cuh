// Step 2: reduces this rank's rows of each token to one, in float32 and in the order of k; a flat row is copied, because the caller has
// already reduced it. Rows that are cast pass through reduce_ring.cuh. The source rank pulls the reduced row from a place of its own
// (CombineArgs::reduced_rows) or from the staging ring.
#pragma once
#include "reduce_rows.cuh"
#include "row_hash.cuh"

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
    u64* hash;    // verified rounds: that of the row
    i32 column;   // verified rounds: this lane's first
};

// The role of a reduce warp: reduces its rows piece by piece, with two steps in flight. The entries of a row are looked up during the row
// before it, and what depends on them one piece later, because each lookup waits for memory. All lanes call all methods together.
template <class Call>
struct Reduce : RowsToReduce<Call> {
    using Rows = RowsToReduce<Call>;
    using Rows::c, Rows::work_list, Rows::now, Rows::next, Rows::piece, Rows::left, Rows::row, Rows::failed;
    using Rows::cfg, Rows::kWeighted, Rows::kSingles;
    using Rows::find, Rows::look_up, Rows::begin_row, Rows::pass;
    using Step = moecomm::Step<Call>;
    static constexpr i32 kColumns = columns_in_16(cfg.type), kPieceColumns = Step::kVectors * kWarp * kColumns;
    static constexpr i32 kPieces = ceil_div(cfg.hidden, kPieceColumns);

    float sum[Step::kVectors][kColumns];

    MOECOMM_FN explicit Reduce(const Call& call) : Rows(call) {}

    MOECOMM_FN void go_on() {
        now = next;
        if constexpr (kPieces == 1) look_up(now);
        next = find();
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
        if constexpr (cfg.verifies) {
            s.column = column();
            s.hash = reinterpret_cast<u64*>(c.a.staged_hashes) + static_cast<i64>(work_list.source_rank(now.step)) * c.shape().max_tokens +
                     Rows::row_index();
        }
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
        if constexpr (cfg.verifies) add_hash(s);
        pass(s.through);
    }
    // Verified rounds: adds the hash of what this warp has stored, and with the first columns of a single row that of its weight.
    MOECOMM_FN void add_hash(const Step& s) const {
        constexpr u64 kPulled = ceil_div(cfg.staged_bytes(), cfg.pull_bytes);  // pieces, each with the weight
        const bool copies = Step::kEntries == 1 || (kSingles && s.single);
        const i32 of_column = bytes_of(copies ? cfg.type : cfg.staged()), bytes = kColumns * of_column;
        u64 found = 0;
#pragma unroll
        for (i32 v = 0; v < Step::kVectors; ++v) {
            if ((s.has >> v & 1) == 0) continue;
            found += hash_stored(s.to - s.column * of_column, s.column * of_column + v * kWarp * bytes, bytes);
        }
        if (kSingles && s.single && s.column == 0) found += kPulled * hash_weight<Reduce>(kWeighted ? s.weight[0] : 1.0f);
        add_hash_of_lanes(s.hash, found);
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
};

// Called by each reduce warp, with one domain. Returns false if a wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN bool reduce(const Call& c) {
    return Reduce<Call>(c).run();
}

}  // namespace moecomm
