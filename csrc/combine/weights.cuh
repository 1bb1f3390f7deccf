// Routing weights that source ranks pass to combine itself (stored behind WindowLayout::packets), instead of those that dispatch stored.
#pragma once
#include "call.cuh"

namespace moecomm {

// Called by all threads of all blocks, before any wait for a peer. Posts this rank's weights to the owners of the experts in this domain,
// as tagged words, so nothing is ordered. Cannot fail.
template <class Call>
MOECOMM_FN void post_weights(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    const auto* owners = reinterpret_cast<const i32*>(c.a.route.token_owner);
    const auto* weights = reinterpret_cast<const u32*>(c.a.topk_weights);
    const i32 warp = blockIdx.x + gridDim.x * warp_id();
#pragma unroll 1
    for (i32 entry = warp * kWarp + lane_id(); entry < c.a.num_tokens * cfg.topk; entry += gridDim.x * cfg.threads()) {
        const i32 owner = owners[entry];
        const u32 weight = weights[entry];
        if (owner >= 0 && c.domains().reaches(owner))
            c.transport.post(owner, weight_at(c.window(), c.shape(), c.round.tag, c.me(), entry), word_signal(c.round.tag, weight));
    }
}

// Called by all lanes of a warp. Puts all weights to a rank of another domain, which reads them only after the tagged words that follow on
// the same channel. The source of the put is this rank's own copy; every warp writes all of it, the same words, so that no warp waits for
// another. Returns false in all lanes if the transport had no room in time; the failure record is filled.
template <class Call>
MOECOMM_FN bool put_weights(const Call& c, i32 peer) {
    constexpr i32 kBatch = 8;
    const auto* weights = reinterpret_cast<const u32*>(c.a.topk_weights);
    const i32 entries = c.a.num_tokens * Call::cfg.topk;
    const u64 first = weight_at(c.window(), c.shape(), c.round.tag, c.me(), 0);
#pragma unroll 1
    for (i32 base = lane_id(); base < entries; base += kBatch * kWarp) {
        u32 bits[kBatch];
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i)
            if (base + i * kWarp < entries) bits[i] = weights[base + i * kWarp];
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i)
            if (const i32 entry = base + i * kWarp; entry < entries)
                c.transport.post(c.me(), first + entry * sizeof(u64), word_signal(c.round.tag, bits[i]));
    }
    __syncwarp();
    return entries == 0 || put(c, c.transport, Phase::header, peer, first, first, entries * sizeof(u64));
}

// Called by lane k. Returns whether `word` now holds the weight of the k-th expert of a token of `source_rank`. Also true in an invalid
// round, where the weight may never arrive and nobody uses the result.
template <class Call>
MOECOMM_FN bool is_weight_here(const Call& c, i32 source_rank, i32 token, u64& word) {
    const volatile i32& is_invalid = c.shared.is_invalid;
    word = load_relaxed(
        own<const u64>(c.a.ctx, weight_at(c.window(), c.shape(), c.round.tag, source_rank, token * Call::cfg.topk + lane_id())));
    return signal_tag(word) == c.round.tag || is_invalid != 0;
}
MOECOMM_FN float weight_in(u64 word) { return __uint_as_float(signal_word(word)); }

}  // namespace moecomm
