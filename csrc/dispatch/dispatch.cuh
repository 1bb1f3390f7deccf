// Dispatch: one kernel from routing to rows at the ranks that own their experts.  Its steps are those of csrc/host/dispatch.cpp.
//
// A grid of at most as many blocks as there are multiprocessors, so that all are resident.  Chunk j of our tokens belongs to block
// j % blocks.  In expert and batched, some warps of each block receive while the others send.
#pragma once
#include "agree.cuh"
#include "announce.cuh"
#include "outputs.cuh"
#include "rank.cuh"
#include "receive.cuh"
#include "send.cuh"

namespace moecomm {

template <class Call>
MOECOMM_FN void prepare_block(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    for (i32 i = threadIdx.x; i < cfg.send_warps * cfg.ring_slots; i += cfg.warps() * kWarp) barrier_init(&c.shared.full[0][0] + i, 1);
    for (i32 i = threadIdx.x; i < kTurnsOpen; i += cfg.warps() * kWarp) c.shared.sent.done[i] = 0;
    barrier_init_done();
    __syncthreads();
}

// Rows move.  False when a peer's did not come.
template <class Call>
MOECOMM_FN bool move_rows(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    if constexpr (!cfg.repeat) {
        if (blockIdx.x == 0) write_counts(c);
        clear_padding(c);
    }
    rank_block(c);
    if constexpr (cfg.receive_warps == 0) {
        send(c);
        return await_all(c);
    } else {
        if (warp_id() >= cfg.send_warps) return receive(c);
        send(c);
        return true;
    }
}

// The last block of the launch counts the round.
template <class Call>
MOECOMM_FN void finish(const Call& c) {
    State* state = own_state(c.a.ctx);
    if (!last_block(&state->finished) || threadIdx.x != 0) return;
    state->bad_entry = 0;
    state->round = c.round.tag;
}

// A launch of `a.workers` blocks of cfg.warps() warps with cfg.shared_bytes of dynamic shared memory.
template <DispatchConfig cfg, class Transport>
MOECOMM_FN void dispatch(const DispatchArgs& a) {
    static_assert(sizeof(DispatchShared<cfg>) <= cfg.shared_bytes, "jit.py and DispatchShared disagree");
    static_assert(Transport::all_reachable, "rows are stored into every peer's window");
    extern __shared__ __align__(128) u8 memory[];
    const Round round{a.ctx, Op::dispatch, load_relaxed(&own_state(a.ctx)->round) + 1};
    const DispatchCall<cfg, Transport> c{a, Transport{a.ctx}, round, *reinterpret_cast<DispatchShared<cfg>*>(memory)};
    if (__syncthreads_or(threadIdx.x == 0 && !not_aborted(round))) return;
    prepare_block(c);
    if (!announce(c) || !agree(c)) return;
    if (c.shared.verdict.failure != Failure::none) {
        clear_route(c);
    } else if (__syncthreads_or(!move_rows(c))) {
        return;
    }
    finish(c);
}

}  // namespace moecomm
