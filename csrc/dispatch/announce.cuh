// Step 2: everybody learns our counts, where our output lies, and how we called.
#pragma once
#include "count.cuh"

namespace moecomm {

// Replaces a column's counts by the counts of all chunks before each, and sends the sum to everybody: zero when our input is bad.
template <class Call>
MOECOMM_FN void total_column(const Call& c, i32 column, bool bad) {
    constexpr DispatchConfig cfg = Call::cfg;
    i32 total = 0;
    for (i32 first = 0; first < c.chunks(); first += kWarp) {
        const i32 chunk = first + lane_id();
        const i32 count = chunk < c.chunks() ? load_fresh(c.chunk_count(column, chunk)) : 0;
        i32 sum = count;
#pragma unroll
        for (i32 distance = 1; distance < kWarp; distance *= 2) {
            const i32 below = __shfl_up_sync(kAllLanes, sum, distance);
            if (lane_id() >= distance) sum += below;
        }
        if (chunk < c.chunks()) *c.chunk_count(column, chunk) = total + sum - count;
        total += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    for (i32 turn = lane_id(); turn < cfg.ranks; turn += kWarp) {
        const i32 p = rotated<cfg.ranks>(c.me(), turn);
        c.transport.template peer_ptr<i32>(p, counts_at(c.window(), cfg.ranks, c.round.tag, c.me()))[column] = bad ? 0 : total;
    }
}

template <class Call>
MOECOMM_FN void fill_notice(const Call& c, Notice& n, u32 bad) {
    n.op = static_cast<u32>(Op::dispatch);
    n.status = static_cast<u32>(bad == 0 ? Argument::none : is_bad_id(bad) ? Argument::topk_idx : Argument::topk_weights);
    n.call = c.a.call;
    n.bad_value = is_bad_id(bad) ? c.id_at(bad_position(bad)) : 0;
    n.num_tokens = c.a.num_tokens;
    n.chunk_tokens = c.a.chunk_tokens;
    n.max_rows = c.a.max_rows;
    n.pad = 0;
    n.x = c.a.out_x;
    n.scales = c.a.out_scales;
    n.src = c.a.out_src;
    n.topk_idx = c.a.out_topk_idx;
    n.weights = c.a.out_weights;
    n.rows = c.a.out_rows;
    n.staging = n.pitch = 0;
}

// By one block, a warp a peer: the notice is the release of everything the grid has told that peer.
template <class Call>
MOECOMM_FN void send_notices(const Call& c, u32 bad) {
    constexpr DispatchConfig cfg = Call::cfg;
    if (threadIdx.x == 0) fill_notice(c, c.shared.mine, bad);
    __syncthreads();
    for (i32 turn = warp_id(); turn < cfg.ranks; turn += cfg.warps()) {
        const u64 there = notice_at(c.window(), cfg.ranks, c.round.tag, c.me());
        c.transport.put(rotated<cfg.ranks>(c.me(), turn), there + sizeof(u64), &c.shared.mine.op, sizeof(Notice) - sizeof(u64), there,
                        tag_signal(c.round.tag));
    }
}

// False when our own grid did not come together.
template <class Call>
MOECOMM_FN bool announce(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    if constexpr (cfg.repeat) {
        if (blockIdx.x == 0) send_notices(c, 0);
        return true;
    }
    State* state = own_state(c.a.ctx);
    count(c);
    if (!grid_barrier(c.round)) return false;
    const u32 bad = load_relaxed(&state->bad_entry);
    for (i32 column = blockIdx.x + gridDim.x * warp_id(); column < cfg.columns(); column += gridDim.x * cfg.warps())
        total_column(c, column, bad != 0);
    if (last_block(&state->announced)) send_notices(c, bad);
    return true;
}

}  // namespace moecomm
