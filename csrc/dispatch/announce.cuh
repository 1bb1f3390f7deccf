// Step 2: every peer learns how this rank called, where its output lies, and its counts.
#pragma once
#include "count.cuh"

namespace moecomm {

// Called by one thread of each block. Fills the parts of the round header that are known before counting. Cannot fail.
template <class Call>
MOECOMM_FN void fill_header(const Call& c, RoundHeader& n) {
    n.op = static_cast<u32>(Op::dispatch);
    n.rejected = load_relaxed(&own_state(c.a.ctx)->rejected);
    bool intact = !Call::cfg.repeat || is_sealed_by_kernel(c.a.route, Call::cfg.ranks);
    if (Call::cfg.repeat) intact = intact && !is_stale(own_mask(c.a.ctx), round_of(c.a.route, Call::cfg.ranks));
    c.shared.masked = own_mask(c.a.ctx).ranks[0];
    n.status = static_cast<u32>(intact ? Argument::none : Argument::handle);
    n.call = c.a.call;
    if constexpr (Call::cfg.compares) n.call = compare_scale(n.call, *reinterpret_cast<const u32*>(c.a.compared));
    n.route_round = Call::cfg.repeat ? round_of(c.a.route, Call::cfg.ranks) : 0;
    if constexpr (Call::cfg.placed && !Call::cfg.repeat) n.route_round = generation_of(c.placement());
    n.num_tokens = c.a.num_tokens;
    n.chunk_tokens = c.a.chunk_tokens;
    n.max_rows = c.a.max_rows;
    n.blocks = c.senders;
    n.dispatch.x = c.a.out_x;
    n.dispatch.scales = c.a.out_scales;
    n.dispatch.src = c.a.out_src;
    n.dispatch.topk_idx = c.a.out_topk_idx;
    n.dispatch.weights = c.a.out_weights;
    n.dispatch.rows = c.a.out_rows;
    if constexpr (Call::cfg.descriptors) {  // fused layers: the owner that makes row descriptors needs these addresses
        n.published.rows = c.a.x;
        n.published.pitch = c.a.x_stride;
        n.published.result_rows = c.a.result_rows;
    }
    n.dispatch.token_packet_bytes = Call::cfg.packets ? Call::cfg.packets_of_row() * Call::cfg.packet_lines * kLineBytes : 0;
}

// Called by the team of every block. Posts the round header to every peer of the domain, one block for each peer, and with few tokens also
// the counts and, with packets, the bits of wanted tokens. These are tagged words, so nothing is ordered. Where each block counted its
// share, sum_column has posted the counts already. Cannot fail.
template <class Call>
MOECOMM_FN void announce(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const u32 bad = cfg.repeat ? 0 : c.shared.bad;
    if (bad != 0) {
        if (c.team_thread() == 0) {
            c.shared.mine.status = static_cast<u32>(is_bad_id(bad) ? Argument::topk_idx : Argument::topk_weights);
            if (is_bad_id(bad)) c.shared.mine.bad_value = c.id_at(bad_position(bad));
        }
        c.team_any(false);
    }
    if (c.shared.masked != 0 && blockIdx.x == 0) answer_for_masked<Call::kTeamFirst, Call::kTeam>(c.a.ctx, c.round.tag, c.shared.mine);
    const i32 columns = cfg.repeat || !c.counts_all ? 0 : cfg.columns(), bits = cfg.packet_lines > 0 ? kWantedWords : 0;
    for (i32 word = c.team_thread(); word < kHeaderWords + columns + bits; word += c.kTeam) {
        const i32 column = word - kHeaderWords, bit = column - columns;
        u32 value = 0;
        if (column < 0) {
            value = reinterpret_cast<const u32*>(&c.shared.mine)[word];
        } else if (bit < 0) {
            value = c.shared.own_counts[column];
        }
        const u64 there = tagged_word(c.round, c.me(), bit < 0 ? word : kHeaderWords + cfg.columns() + bit);
#pragma unroll 1
        for (i32 step = c.nth_unpacker(); step >= 0 && step < cfg.ranks; step += c.unpackers()) {
            const i32 peer = rotated<cfg.ranks>(c.me(), step);
            if (!c.domains().reaches(peer)) continue;  // send_tagged_words puts to these
            if (cfg.packets && bit >= 0) value = c.shared.wanted[peer][bit];
            c.transport.post(peer, there, word_signal(c.round.tag, value));
        }
    }
}

}  // namespace moecomm
