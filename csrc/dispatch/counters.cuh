// Counting the rows of a dispatch (csrc/protocol/counters.h).
#pragma once
#include "call.cuh"

namespace moecomm {

// Called by one warp of the rank after the round was found valid; the counts of all ranks have arrived as tagged words. A repeat has none,
// and counts the rows of the dispatch that it repeats. Relaxed adds; cannot fail.
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

}  // namespace moecomm
