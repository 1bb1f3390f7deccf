// Routing weights that homes give the combine itself (WindowLayout::packets), not those that the dispatch has left beside the rows.
#pragma once
#include "call.cuh"

namespace moecomm {

// By all threads of the grid: ours, to the owners of our experts, before anybody is waited for.
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
        if (owner >= 0)
            c.transport.post(owner, weight_at(c.window(), c.shape(), c.round.tag, c.me(), entry), word_signal(c.round.tag, weight));
    }
}

// By lane k: whether the weight of the k-th expert of a token of `home` is here, in `word` then.  In a void round, where it may never come,
// any will do: what is made with it goes nowhere.
template <class Call>
MOECOMM_FN bool is_weight_here(const Call& c, i32 home, i32 token, u64& word) {
    const volatile i32& is_void = c.shared.is_void;
    word = load_relaxed(own<const u64>(c.a.ctx, weight_at(c.window(), c.shape(), c.round.tag, home, token * Call::cfg.topk + lane_id())));
    return signal_tag(word) == c.round.tag || is_void != 0;
}
MOECOMM_FN float weight_in(u64 word) { return __uint_as_float(signal_word(word)); }

}  // namespace moecomm
