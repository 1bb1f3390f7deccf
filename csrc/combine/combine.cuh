// Combine: one kernel from the experts' rows to the sum at each token's home.  Its steps are those of csrc/host/combine.cpp.
//
// In each block some warps reduce and stage the rows here while the others pull reduced rows home.  Reducing never waits for pulling of
// the same round, so pulling always ends.
#pragma once
#include "pull.cuh"
#include "reduce.cuh"
#include "stage.cuh"

namespace moecomm {

template <class Call>
MOECOMM_FN void fill_notice(const Call& c, Notice& n) {
    n = Notice{};
    n.op = static_cast<u32>(Op::combine);
    n.call = c.a.call;
    n.num_tokens = c.a.num_tokens;
    n.staging = c.window().staging;
}

template <class Call>
MOECOMM_FN void prepare_block(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    auto& shared = c.shared;
    for (i32 i = threadIdx.x; i < cfg.reduce_warps * cfg.reduce_slots; i += cfg.warps() * kWarp)
        barrier_init(&shared.reduce[i / cfg.reduce_slots].full[i % cfg.reduce_slots], 1);
    for (i32 i = threadIdx.x; i < cfg.pull_warps * cfg.pull_slots; i += cfg.warps() * kWarp)
        barrier_init(&shared.pull[i / cfg.pull_slots].full[i % cfg.pull_slots], 1);
    for (i32 i = threadIdx.x; i < kTurnsOpen; i += cfg.warps() * kWarp) shared.staged.done[i] = 0;
    if (threadIdx.x == 0) {
        fill_notice(c, shared.mine);
        shared.is_void = 0;
    }
    barrier_init_done();
    __syncthreads();
}

// By one block, a warp a peer.
template <class Call>
MOECOMM_FN void announce(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    for (i32 turn = warp_id(); turn < cfg.ranks; turn += cfg.warps()) {
        const u64 there = notice_at(c.window(), cfg.ranks, c.round.tag, c.me());
        c.transport.put(rotated<cfg.ranks>(c.me(), turn), there + sizeof(u64), &c.shared.mine.op, sizeof(Notice) - sizeof(u64), there,
                        tag_signal(c.round.tag));
    }
}

// A warp: our staging still holds the rows of our last combine until every rank has read them.  A rank that wants none of our rows now
// may be through with this combine already, so a later tag will do.
template <class Call>
MOECOMM_FN bool await_drained(const Call& c) {
    const u32 last = load_relaxed(&own_state(c.a.ctx)->last_combine);
    bool missing = false;
    for (i32 p = lane_id(); last != 0 && p < Call::cfg.ranks && !missing; p += kWarp) {
        const auto* flag = c.transport.template local<const u64>(drained_at(c.window(), p));
        u32 tag;
        const auto reached = [&] {
            tag = signal_tag(load_acquire(flag));
            return static_cast<i32>(tag - last) >= 0;
        };
        missing = !wait_for(c.round, Phase::drained, p, last, reached, [&] { return static_cast<i64>(tag); });
    }
    return !__any_sync(kAllLanes, missing);
}

template <class Call>
MOECOMM_FN bool reduce_or_pull(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    if (warp_id() >= cfg.reduce_warps) return pull(c);
    if (!await_drained(c)) return false;
    fence_async();  // bulk stores into the staging come after its readers' flags
    if constexpr (cfg.layout == Layout::flat) {
        stage(c);
    } else {
        reduce(c);
    }
    return true;
}

// The last block of the launch: we have read all we wanted, so our peers may overwrite it.
template <class Call>
MOECOMM_FN void finish(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    State* state = own_state(c.a.ctx);
    if (!last_block(&state->finished)) return;
    const bool is_void = c.shared.is_void != 0;
    for (i32 turn = threadIdx.x; turn < cfg.ranks && !is_void; turn += cfg.warps() * kWarp)
        c.transport.signal(rotated<cfg.ranks>(c.me(), turn), drained_at(c.window(), c.me()), tag_signal(c.round.tag));
    if (threadIdx.x != 0) return;
    if (!is_void) state->last_combine = c.round.tag;
    state->round = c.round.tag;
}

// A launch of `a.workers` blocks of cfg.warps() warps with cfg.shared_bytes of dynamic shared memory.
template <CombineConfig cfg, class Transport>
MOECOMM_FN void combine(const CombineArgs& a) {
    static_assert(sizeof(CombineShared<cfg>) <= cfg.shared_bytes, "jit.py and CombineShared disagree");
    static_assert(Transport::all_reachable, "rows are loaded from every peer's window");
    extern __shared__ __align__(128) u8 memory[];
    const Round round{a.ctx, Op::combine, load_relaxed(&own_state(a.ctx)->round) + 1};
    const CombineCall<cfg, Transport> c{a, Transport{a.ctx}, round, *reinterpret_cast<CombineShared<cfg>*>(memory)};
    if (__syncthreads_or(threadIdx.x == 0 && !not_aborted(round))) return;
    prepare_block(c);
    if (blockIdx.x == 0) announce(c);
    if (__syncthreads_or(!reduce_or_pull(c))) return;
    finish(c);
}

}  // namespace moecomm
