// Step 2: everybody learns our counts, where our output lies, and how we called.
#pragma once
#include "count.cuh"

namespace moecomm {

// By one thread: what is known before counting.
template <class Call>
MOECOMM_FN void fill_notice(const Call& c, Notice& n) {
    n.op = static_cast<u32>(Op::dispatch);
    n.status = static_cast<u32>(Argument::none);
    n.call = c.a.call;
    n.bad_value = 0;
    n.num_tokens = c.a.num_tokens;
    n.chunk_tokens = c.a.chunk_tokens;
    n.max_rows = c.a.max_rows;
    n.blocks = static_cast<i32>(gridDim.x);
    n.x = c.a.out_x;
    n.scales = c.a.out_scales;
    n.src = c.a.out_src;
    n.topk_idx = c.a.out_topk_idx;
    n.weights = c.a.out_weights;
    n.rows = c.a.out_rows;
    n.pitch = 0;
}

// Every thread of every block: a block a peer.  Where blocks have counted their shares, the sums of all are with the peers already.
template <class Call>
MOECOMM_FN void announce(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const u32 bad = cfg.repeat ? 0 : c.shared.bad;
    if (bad != 0) {
        if (threadIdx.x == 0) {
            c.shared.mine.status = static_cast<u32>(is_bad_id(bad) ? Argument::topk_idx : Argument::topk_weights);
            if (is_bad_id(bad)) c.shared.mine.bad_value = c.id_at(bad_position(bad));
        }
        __syncthreads();
    }
    for (i32 turn = blockIdx.x; turn < cfg.ranks; turn += gridDim.x)
        send_mail(c.round, c.transport, rotated<cfg.ranks>(c.me(), turn), c.shared.mine, cfg.repeat || !c.alone ? 0 : cfg.columns(),
                  threadIdx.x, cfg.threads(), [&](i32 column) { return c.shared.ours[column]; });
}

}  // namespace moecomm
