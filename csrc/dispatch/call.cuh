// What the parts of one dispatch share: arguments, transport, the round, and the block's shared memory.
#pragma once
#include "../device/bulk.cuh"
#include "../device/cast.cuh"
#include "../device/copy.cuh"
#include "../device/grid.cuh"
#include "../device/turn.cuh"

namespace moecomm {

template <DispatchConfig cfg>
struct DispatchShared {
    static constexpr i32 ring_bytes = cfg.send_warps * cfg.ring_slots * cfg.piece_bytes();
    static constexpr i32 scratch_bytes = cfg.scratch_warps * cfg.columns() * static_cast<i32>(sizeof(i32));

    // Pieces of rows on their way.  Before the first of them: counters of all columns for some warps.
    alignas(128) u8 ring[ring_bytes > scratch_bytes ? ring_bytes : scratch_bytes];
    u64 full[cfg.send_warps][cfg.ring_slots];
    i64 needed[cfg.ranks];  // rows at each rank; batched: the first count that is too large, else 0
    Notice mine;
    Notice notices[cfg.ranks];
    Verdict verdict;
    i32 total[cfg.experts];  // entries of all ranks
    i32 base[cfg.experts];   // row, at its owner, of our first entry
    i32 flat_total[cfg.ranks];
    i32 flat_base[cfg.ranks];
    i32 filled[cfg.experts_here()];  // end of the rows of each expert here, padding not included
    Turns<cfg.send_warps> sent;      // chunks of this block
    float scales[cfg.quantize ? cfg.send_warps : 1][cfg.quantize ? cfg.scale_groups() : 1];
};

template <DispatchConfig config, class T>
struct DispatchCall {
    static constexpr DispatchConfig cfg = config;
    using Transport = T;

    const DispatchArgs& a;
    Transport transport;
    Round round;
    DispatchShared<config>& shared;

    MOECOMM_FN i32 me() const { return a.ctx.rank; }
    MOECOMM_FN const WindowLayout& window() const { return a.ctx.window; }
    MOECOMM_FN i32 chunks() const { return ceil_div(a.num_tokens, a.chunk_tokens); }
    MOECOMM_FN i32 chunk_end(i32 chunk) const { return min((chunk + 1) * a.chunk_tokens, a.num_tokens); }
    MOECOMM_FN i32* counter_scratch(i32 warp) const { return reinterpret_cast<i32*>(shared.ring) + warp * cfg.columns(); }

    // Scratch of the window, by column and chunk.  At first the chunk's entries of an expert, or tokens for a rank; then those of all
    // chunks before it; in the columns of ranks at last the low word of chunk_signal.
    MOECOMM_FN i32* chunk_count(i32 column, i32 chunk) const {
        return transport.template local<i32>(window().chunk_counts) + static_cast<i64>(column) * window().chunks + chunk;
    }
    MOECOMM_FN const i32* counts_of(i32 source) const {
        return transport.template local<const i32>(counts_at(window(), cfg.ranks, round.tag, source));
    }
    MOECOMM_FN i64 id_at(i64 entry) const {
        if constexpr (cfg.idx_bytes == 8) return reinterpret_cast<const i64*>(a.topk_idx)[entry];
        return reinterpret_cast<const i32*>(a.topk_idx)[entry];
    }
    MOECOMM_FN float weight_at(i64 entry) const {
        return a.topk_weights != 0 ? reinterpret_cast<const float*>(a.topk_weights)[entry] : 1.0f;
    }
};

// Calls body(token, k, id) for the entries of a chunk in order, a lane each and whole tokens at once; token -1 in idle lanes.  All lanes
// of the warp run the body together.
template <class Call, class Body>
MOECOMM_FN void for_entries(const Call& c, i32 chunk, Body body) {
    constexpr i32 kAhead = 4;  // steps whose ids are loaded together
    constexpr i32 step = Call::cfg.tokens_per_step();
    const i32 nth = lane_id() / Call::cfg.topk, k = lane_id() % Call::cfg.topk, end = c.chunk_end(chunk);
    for (i32 first = chunk * c.a.chunk_tokens; first < end; first += kAhead * step) {
        i64 ids[kAhead];
#pragma unroll
        for (i32 i = 0; i < kAhead; ++i) {
            const i32 token = first + i * step + nth;
            ids[i] = nth < step && token < end ? c.id_at(static_cast<i64>(token) * Call::cfg.topk + k) : -1;
        }
#pragma unroll
        for (i32 i = 0; i < kAhead; ++i) {
            const i32 token = first + i * step + nth;
            body(nth < step && token < end ? token : -1, k, ids[i]);
        }
    }
}

}  // namespace moecomm
