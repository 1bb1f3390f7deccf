// Step 2: the rows of each token here become one, in fp32 and in the order of k (flat: the row that the caller has made of them), staged
// for the token's home.
#pragma once
#include "gather.cuh"
#include "straight.cuh"
#include "weights.cuh"

namespace moecomm {

// A chunk of a home's tokens: a unit of staging.  The first chunks of all homes come before the second of any.
struct Unit {
    i32 home, chunk, chunk_tokens, first, rows;  // flat rows [first, first + rows); chunk -1: there is no such chunk
};
// Of all homes that what we have does not go straight to: that is put before anything is staged for others, because it waits for no place,
// and its home for all of it.
template <class Call>
MOECOMM_FN Unit unit_at(const Call& c, i32 nth, i32 units) {
    constexpr CombineConfig cfg = Call::cfg;
    const bool first = cfg.domains() > 1 && nth < units;
    if (cfg.domains() > 1 && !first) nth -= units;
    const i32 home = rotated<cfg.ranks>(c.me(), nth % cfg.ranks), chunk = nth / cfg.ranks;
    const i32 chunk_tokens = c.shared.sent[home].chunk_tokens;
    if (chunk >= c.chunks_of(home)) return {home, -1, chunk_tokens, 0, 0};
    if (cfg.domains() > 1 && first != c.straight_to(home)) return {home, -1, chunk_tokens, 0, 0};
    const u64 range = reinterpret_cast<const u32*>(c.a.route.ranges)[static_cast<i64>(home) * c.shape().max_tokens + chunk];
    return {home, chunk, chunk_tokens, signal_first(range), signal_count(range)};
}
template <class Call>
MOECOMM_FN i32 count_units(const Call& c) {
    i32 most = 0;
    for (i32 s = 0; s < Call::cfg.ranks; ++s) most = max(most, c.chunks_of(s));
    return most * Call::cfg.ranks;
}

// The role of a reduce warp: in each unit of the block every reduce_warps-th piece of its rows.  The last item of a unit, or an empty one,
// carries its turn, so that every warp comes to every turn in order.
template <class Call>
struct Reduce {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr Type kType = cfg.type;
    static constexpr i32 kRowBytes = cfg.row_bytes();
    static constexpr bool kWeighted = cfg.weighted && cfg.layout != Layout::flat;
    static constexpr i32 kPieces = ceil_div(cfg.row_bytes(), cfg.reduce_bytes), kPieceColumns = cfg.reduce_bytes / bytes_of(cfg.type);

    const Call& c;
    const i32 units;
    i32 turn = 0;
    i32 at;     // the next piece of the unit
    Unit unit;  // of the turn
    i32 entry;  // this lane's row of the piece, -1: none
    u64 word;   // own weights: that of the row
    bool failed = false;

    MOECOMM_FN explicit Reduce(const Call& call) : c(call), units(count_units(call)) { begin_unit(); }

    static constexpr i32 kPasses = cfg.domains() > 1 ? 2 : 1;  // over all units

    MOECOMM_FN i32 nth() const { return blockIdx.x + gridDim.x * turn; }
    MOECOMM_FN bool has_piece() const { return at < unit.rows * kPieces; }
    MOECOMM_FN i32 slot() const { return unit.first + at / kPieces; }

    MOECOMM_FN void begin_unit() {
        at = warp_id();
        unit = nth() < kPasses * units ? unit_at(c, nth(), units) : Unit{0, -1, 1, 0, 0};
        look_ahead();
    }
    // What the next piece is made of, loaded before it is wanted.
    MOECOMM_FN void look_ahead() {
        entry = -1;
        if (!has_piece()) return;
        if constexpr (cfg.layout == Layout::flat) {
            if (lane_id() == 0) entry = slot();
        } else {
            if (lane_id() < cfg.topk) entry = reinterpret_cast<const i32*>(c.a.route.rows)[static_cast<i64>(slot()) * cfg.topk + lane_id()];
        }
    }

    // Whether the home has pulled the chunk whose place in the ring the unit takes.  Asked only where we have rows for it: the home can't
    // be further, because it will want them.
    MOECOMM_FN Next await_place(bool may_wait) {
        const i32 before = unit.chunk - ring_chunks(c.shape(), unit.chunk_tokens);
        if (before < 0 || unit.rows == 0 || at != warp_id()) return Next::item;
        const u64 credit = word_signal(c.round.tag, before);
        const auto* place = c.transport.template local<const u64>(credit_at(c.window(), c.shape(), unit.home, before, unit.chunk_tokens));
        const volatile i32& is_void = c.shared.is_void;  // in a void round nobody pulls
        const auto given = [&] { return load_acquire(place) == credit || is_void != 0; };
        bool came = true;
        if (lane_id() == 0 && !given()) {
            came = may_wait && wait_for(c.round, Phase::drained, c.domains().local(unit.home), before, given,
                                        [&] { return static_cast<i64>(signal_word(load_acquire(place))); });
        }
        if (__all_sync(kAllLanes, came)) return Next::item;
        failed = may_wait;
        return may_wait ? Next::none : Next::later;
    }

    MOECOMM_FN i32 token() const {
        const i32 first = __ffs(__ballot_sync(kAllLanes, entry >= 0)) - 1;
        return reinterpret_cast<const int2*>(c.a.route.src)[__shfl_sync(kAllLanes, entry, first)].y;
    }

    // The home has posted the weights of the piece before it waits for anybody.
    MOECOMM_FN bool await_weights(bool may_wait) {
        const i32 of = token();
        const auto here = [&] { return is_weight_here(c, unit.home, of, word); };
        bool came = true;
        if (entry >= 0 && !here())
            came = may_wait &&
                   wait_for(c.round, Phase::notice, unit.home, c.round.tag, here, [&] { return static_cast<i64>(signal_tag(word)); });
        return __all_sync(kAllLanes, came);
    }

    MOECOMM_FN Next open(Source& source, Item& out, bool may_wait) {
        if (failed || nth() >= kPasses * units) return Next::none;
        if (const Next place = await_place(may_wait); place != Next::item) return place;
        if constexpr (cfg.own_weights) {
            if (has_piece() && !await_weights(may_wait)) {
                failed = may_wait;
                return may_wait ? Next::none : Next::later;
            }
        }
        out = {0, -1, 0, 0, -1};
        if (has_piece()) fill_item(source, out);
        at += cfg.reduce_warps;
        if (has_piece()) {
            look_ahead();
        } else {
            out.turn = turn++;
            begin_unit();
        }
        return Next::item;
    }

    MOECOMM_FN void fill_item(Source& source, Item& out) const {
        const i32 column = at % kPieces * kPieceColumns, row = entry, of = token();
        out = {0, of, unit.home, column, -1};
        if (column == 0 && c.a.weight_grads != 0) stage_grads(row, of);
        if (row < 0) return;
        source.piece = reinterpret_cast<const u8*>(c.a.y) + row * c.a.y_stride + column * bytes_of(kType);
        if constexpr (cfg.own_weights) {
            source.weight = weight_in(word);
        } else if constexpr (kWeighted) {
            source.weight = reinterpret_cast<const float*>(c.a.route.row_weights)[row];
        }
    }

    MOECOMM_FN void stage_grads(i32 row, i32 token) const {
        if (lane_id() >= cfg.topk) return;
        const auto* grads = reinterpret_cast<const float*>(c.a.weight_grads);
        float grad;
        if constexpr (cfg.layout == Layout::flat) {
            grad = grads[static_cast<i64>(slot()) * cfg.topk + lane_id()];
        } else {
            grad = row >= 0 ? grads[row] : 0.0f;
        }
        reinterpret_cast<float*>(c.staged_row(c.me(), unit.home, token) + c.grads_at())[lane_id()] = grad;
    }

    template <i32 n>
    MOECOMM_FN void store(const Item& out, i32 column, const float (&sum)[n]) const {
        store_columns<cfg.staged()>(c.staged_row(c.me(), out.home, out.token) + column * bytes_of(cfg.staged()), sum);
    }

    // The last warp of a turn tells the home, or who relays for it.
    MOECOMM_FN void close(const Item& out) const {
        if (out.turn < 0) return;
        fence_async();  // the home reads with bulk copies
        if (!complete_turn(c.shared.staged, c.round, out.turn)) return;
        i32 nth = blockIdx.x + gridDim.x * out.turn;
        const bool straight = cfg.domains() > 1 && nth < units;
        if (cfg.domains() > 1 && !straight) nth -= units;
        const i32 home = rotated<cfg.ranks>(c.me(), nth % cfg.ranks), chunk = nth / cfg.ranks;
        if constexpr (cfg.domains() > 1) {
            if (straight != c.straight_to(home)) return;
            if (straight) {  // return warps put it
                if (lane_id() == 0 && chunk < c.chunks_of(home))
                    c.transport.signal(c.me(), c.staged_flag(home, chunk), word_signal(c.round.tag, chunk));
                return;
            }
        }
        if (lane_id() == 0 && chunk < c.chunks_of(home))
            c.transport.signal(c.domains().local(home), c.reduced_flag(home, c.me(), chunk), tag_signal(c.round.tag));
    }
};

// By each reduce warp.  False when a place in the ring did not become free.
template <class Call>
MOECOMM_FN bool reduce(const Call& c) {
    if constexpr (Call::cfg.domains() > 1) {
        if (!await_heard(c)) return false;
    }
    Reduce<Call> role(c);
    using Ring = RowRing<Call::cfg.reduce_slots, Call::cfg.reduce_bytes>;
    Gather<Ring, Reduce<Call>>{c.shared.reduce[warp_id()], role}.run();
    return !role.failed;
}

}  // namespace moecomm
