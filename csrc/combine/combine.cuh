// Combine: one kernel from the experts' rows to the sum at each token's home.  Its steps are those of csrc/host/combine.cpp.
//
// In each block some warps reduce and stage the rows here while the others pull reduced rows home; or, where peers read our rows in place,
// all warps pull.  A unit is staged once the home has pulled what was in its place: csrc/protocol/layout.h says why that ends.  The rows of
// a home with few tokens are neither staged nor pulled: the warps that reduce push them in packets, and the home's pull warps collect
// these.
#pragma once
#include "pull.cuh"
#include "push.cuh"
#include "reduce.cuh"
#include "scaleout/return_forward.cuh"

namespace moecomm {

template <class Call>
MOECOMM_FN void fill_header(const Call& c, RoundHeader& n) {
    // On their way while the rest is written.
    const u32 round = round_of(c.a.route, Call::cfg.ranks), rejected = load_relaxed(&own_state(c.a.ctx)->rejected);
    const bool intact = is_sealed_by_kernel(c.a.route, Call::cfg.ranks);
    n = RoundHeader{};
    n.op = static_cast<u32>(Op::combine);
    n.rejected = rejected;
    n.call = c.a.call;
    n.num_tokens = c.a.num_tokens;
    n.chunk_tokens = c.a.chunk_tokens;
    if constexpr (Call::cfg.in_place) {
        n.x = c.a.y - c.a.ctx.peers[c.me()];
        n.pitch = static_cast<u64>(c.a.y_stride);
    } else if (c.has_reduced_rows()) {
        n.x = c.a.reduced_rows - c.a.ctx.peers[c.me()];
        n.pitch = static_cast<u64>(c.sum_pitch());
        n.rows = 1;
    }
    n.value = round;
    n.status = static_cast<u32>(intact ? Argument::none : Argument::handle);
}

// By all threads: what a block needs before the first __syncthreads, while its arguments are on their way.
template <CombineConfig cfg>
MOECOMM_FN void prepare_block(CombineShared<cfg>& shared) {
    if constexpr (cfg.domains() > 1) {
        for (i32 i = threadIdx.x; i < cfg.return_forward_warps * cfg.pull_slots; i += cfg.threads())
            barrier_init(&scaleout_shared(shared).rings[i / cfg.pull_slots].full[i % cfg.pull_slots], 1);
        if (threadIdx.x == 0) scaleout_shared(shared).headers_seen = 0;
    }
#pragma unroll 1
    for (i32 i = threadIdx.x; i < cfg.pull_warps * cfg.pull_slots; i += cfg.threads())
        barrier_init(&shared.pull[i / cfg.pull_slots].full[i % cfg.pull_slots], 1);
#pragma unroll 1
    for (i32 i = threadIdx.x; i < kOpenSteps; i += cfg.threads()) shared.staged.done[i] = shared.pulled.done[i] = 0;
    if (threadIdx.x == 0) {
        shared.missing = 0;
        shared.is_invalid = 0;
    }
    barrier_init_done();
}

// A block a peer.
template <class Call>
MOECOMM_FN void announce(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    if (static_cast<i32>(threadIdx.x) >= kHeaderWords) return;
    for (i32 step = blockIdx.x; step < cfg.ranks; step += gridDim.x) {
        const i32 peer = rotated<cfg.ranks>(c.me(), step);
        if (c.domains().reaches(peer)) send_header(c.round, c.transport, peer, c.shared.mine, threadIdx.x, kHeaderWords);
    }
}

// A warp: until every rank has read what we offered in the combine of tag `wanted`.  A rank that wants none of our rows may be through with
// this one already, so a later tag will do.
template <class Call>
MOECOMM_FN bool await_drained(const Call& c, u32 wanted) {
    bool missing = false;
    for (i32 p = lane_id(); wanted != 0 && p < Call::cfg.ranks && !missing; p += kWarp) {
        if (!c.domains().reaches(p)) continue;
        const auto* flag = c.transport.template local<const u64>(drained_at(c.window(), p));
        u32 tag;
        const auto reached = [&] {
            tag = signal_tag(load_acquire(flag));
            return has_reached(tag, wanted, c.round.tag);
        };
        missing = !wait_for(c.round, Phase::drained, p, wanted, reached, [&] { return static_cast<i64>(tag); });
    }
    return !__any_sync(kAllLanes, missing);
}

template <class Call>
MOECOMM_FN bool reduce_or_pull(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    constexpr i32 return_forward_threads = cfg.reduce_warps + cfg.pull_warps;
    if constexpr (cfg.domains() > 1) {
        if (warp_id() >= return_forward_threads && warp_id() < return_forward_threads + cfg.return_forward_warps)
            return give_back(c, warp_id() - return_forward_threads);
    } else {
        if ((cfg.reduce_warps == 0 || warp_id() < cfg.reduce_warps) && !push(c)) return false;
    }
    if (warp_id() >= cfg.reduce_warps && warp_id() < return_forward_threads) return pull(c);
    if constexpr (!cfg.in_place) {
        if (c.all_in_packets) return true;
        if (warp_id() >= cfg.reduce_warps) return raise_flags(c);
        return (c.has_reduced_rows() || await_drained(c, load_relaxed(&own_state(c.a.ctx)->last_combine))) && reduce(c);
    }
    return true;
}

// The last block of the launch: we have read all we wanted, so our peers may overwrite it.  The caller may overwrite rows that were read
// in place when the kernel ends, so it ends when everybody has read them.  Packets are read before we send the next notice, and nobody
// overwrites them before it has heard that: where there is nothing else, there is nothing to say.  Else every rank says so, because those
// that staged or offered rows wait for all, one that took packets alone included.
template <class Call>
MOECOMM_FN void finish(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    State* state = own_state(c.a.ctx);
    if (c.all_in_packets) return;
    if (!last_block(&state->finished) || c.shared.is_invalid != 0) return;
    if (threadIdx.x >= kWarp) return;  // warp_id() would be kept in a register from the begin of the kernel on
    if (lane_id() == 0) state->taken = 0;
    for (i32 step = lane_id(); step < cfg.scaleup_ranks(); step += kWarp)
        c.transport.signal(c.domains().neighbour(step), drained_at(c.window(), c.me()), tag_signal(c.round.tag));
    if (cfg.in_place || c.has_reduced_rows()) {
        await_drained(c, c.round.tag);
    } else if (lane_id() == 0) {
        state->last_combine = c.round.tag;
    }
}

// A launch of `workers` blocks of cfg.threads() threads with cfg.shared_bytes of dynamic shared memory.
template <CombineConfig cfg, class Transport>
MOECOMM_FN void combine(const CombineArgs& args) {
    constexpr i32 beside = cfg.return_forward_warps > 0 ? sizeof(ScaleoutShared<cfg>) + 128 : 0;
    static_assert(sizeof(CombineShared<cfg>) + beside <= cfg.shared_bytes, "jit.py and CombineShared disagree");
    static_assert(Transport::all_reachable == (cfg.domains() == 1), "ranks of other domains are put to, and only they");
    extern __shared__ __align__(128) u8 memory[];
    auto& shared = *reinterpret_cast<CombineShared<cfg>*>(memory);
    const CombineArgs& a = shared.args;
    copy_args(shared.args, args, cfg.threads());
    prepare_block(shared);
    await_earlier_kernels();
    const auto publish_rows = [&] {  // which earlier kernels have written, before the notice
        if (cfg.in_place && blockIdx.x < cfg.ranks && threadIdx.x < kHeaderWords) fence_system();
    };
    if constexpr (!cfg.packets) publish_rows();
    __syncthreads();
    CombineCall<cfg, Transport> c{a, Transport{a.ctx}, {a.ctx, Op::combine, 0}, shared, false};
    bool others = false;  // homes that do not come in packets
    for (i32 p = threadIdx.x; p < cfg.ranks; p += cfg.threads()) others = !look_up_source_rank(c, p) || others;
    if (threadIdx.x == cfg.threads() - 1) look_up_round(a.ctx, shared.begin);
    if (threadIdx.x == cfg.threads() - 2 * kWarp) fill_header(c, shared.mine);  // whose warp loads nothing else
    c.all_in_packets = !__syncthreads_or(others);
    c.round.tag = shared.begin.tag;
    if (!begin_round(c.round, shared.begin, cfg.threads())) return;
    if (cfg.packets && !c.all_in_packets) publish_rows();
    announce(c);
    if constexpr (cfg.own_weights) {
        if (shared.mine.status == static_cast<u32>(Argument::none)) post_weights(c);
    }
    if constexpr (cfg.domains() > 1) {
        if constexpr (cfg.own_weights) {
            send_tagged_words(c, kHeaderWords, [&](i32 peer) { return put_weights(c, peer); });
        } else {
            send_tagged_words(c, kHeaderWords);
        }
    }
    if (__syncthreads_or(!reduce_or_pull(c))) return;
    finish(c);
}

}  // namespace moecomm
