// Combine: one kernel from the experts' rows to the sum at each token's source rank. The steps are those of csrc/host/combine.cpp.
//
// In each block, reduce warps reduce and stage this rank's rows, while pull warps pull reduced rows of this rank's tokens. Where peers read
// rows in place, all warps pull. A chunk is staged once the source rank has pulled the chunk that held its place before;
// csrc/protocol/layout.h proves that this cannot deadlock. Rows for a source rank with few tokens are neither staged nor pulled: reduce
// warps push them in packets, which the pull warps of the source rank collect.
#pragma once
#include "pull.cuh"
#include "push.cuh"
#include "reduce.cuh"
#include "reduce_ring.cuh"
#include "scaleout_flags.cuh"
#include "scaleout_return_forward.cuh"

namespace moecomm {

// Called by one thread of each block, before a __syncthreads. Fills the round header. Cannot fail.
template <class Call>
MOECOMM_FN void fill_header(const Call& c, RoundHeader& n) {
    // loads in flight while other fields are written
    const u32 round = round_of(c.a.route, Call::cfg.ranks), rejected = load_relaxed(&own_state(c.a.ctx)->rejected);
    bool intact = is_sealed_by_kernel(c.a.route, Call::cfg.ranks);
    intact = intact && !is_stale(own_mask(c.a.ctx), round);
    c.shared.masked = own_mask(c.a.ctx).ranks[0];
    n = RoundHeader{};
    n.op = static_cast<u32>(Op::combine);
    n.rejected = rejected;
    n.call = c.a.call;
    n.num_tokens = c.a.num_tokens;
    n.chunk_tokens = c.a.chunk_tokens;
    if constexpr (Call::cfg.in_place) {
        n.combine.rows = c.a.y - c.a.ctx.peers[c.me()];
        n.combine.pitch = static_cast<u64>(c.a.y_stride);
        if constexpr (Call::cfg.unsummed && Call::cfg.weighted && !Call::cfg.own_weights)
            n.combine.weights = c.a.route.row_weights - c.a.ctx.peers[c.me()];
    } else if (c.has_reduced_rows()) {
        n.combine.rows = c.a.reduced_rows - c.a.ctx.peers[c.me()];
        n.combine.pitch = static_cast<u64>(c.reduced_row_pitch());
        n.combine.is_reduced = 1;
    }
    n.route_round = round;
    n.status = static_cast<u32>(intact ? Argument::none : Argument::handle);
}

// Called by all threads before the block's first __syncthreads, while arguments load. Initializes mbarriers and shared counters.
template <class Transport, CombineConfig cfg>
MOECOMM_FN void prepare_block(CombineShared<cfg>& shared) {
    if constexpr (cfg.domains() > 1) {
        for (i32 i = threadIdx.x; i < cfg.return_forward_warps * cfg.pull_slots; i += cfg.threads())
            barrier_init(&scaleout_shared(shared).rings[i / cfg.pull_slots].full[i % cfg.pull_slots], 1);
        if constexpr (!cfg.in_place) {
            for (i32 i = threadIdx.x; i < cfg.reduce_warps * cfg.reduce_slots; i += cfg.threads())
                barrier_init(&scaleout_shared(shared).reduce[i / cfg.reduce_slots].full[i % cfg.reduce_slots], 1);
        }
        for (i32 i = threadIdx.x; i < cfg.return_forward_warps; i += cfg.threads()) Transport::prepare(put_rings<Transport>(shared)[i]);
        if (threadIdx.x == 0) scaleout_shared(shared).headers_seen = 0;
    }
    if constexpr (cfg.domains() == 1 && cfg.reduce_slots > 0) {
#pragma unroll 1
        for (i32 i = threadIdx.x; i < cfg.reduce_warps * cfg.reduce_slots; i += cfg.threads())
            barrier_init(&shared.reduce[i / cfg.reduce_slots].full[i % cfg.reduce_slots], 1);
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

// Called by all threads of all blocks. Sends the round header to each peer of the domain, one block for each peer. The header is tagged
// words, so nothing is ordered. Cannot fail.
template <class Call>
MOECOMM_FN void announce(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    if (static_cast<i32>(threadIdx.x) >= kHeaderWords) return;
    for (i32 step = blockIdx.x; step < cfg.ranks; step += gridDim.x) {
        const i32 peer = rotated<cfg.ranks>(c.me(), step);
        if (c.domains().reaches(peer)) send_header(c.round, c.transport, peer, c.shared.mine, threadIdx.x, kHeaderWords);
    }
    if (c.shared.masked != 0 && blockIdx.x == 0) answer_for_masked<0, kHeaderWords>(c.a.ctx, c.round.tag, c.shared.mine);
}

// Called by all lanes of a warp. Waits until every rank of the domain has read the rows that this rank staged or published in the combine
// of tag `wanted` (acquire). A later tag counts, too: a rank that needs no row of this rank may already have finished this combine. Returns
// false in all lanes if a signal did not come; the failure record is filled.
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

// Called by all threads of all blocks. Gives each warp its role: push and reduce, pull, return-forward or flag. Returns false in a warp
// whose wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN bool reduce_or_pull(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    constexpr i32 first_return_forward_warp = cfg.reduce_warps + cfg.pull_warps;
    if constexpr (cfg.domains() > 1) {
        MOECOMM_SPAN(return_forward, c.round, threadIdx.x == first_return_forward_warp * kWarp);
        MOECOMM_SPAN(flags, c.round, threadIdx.x == (first_return_forward_warp + cfg.return_forward_warps) * kWarp);
        if (warp_id() >= first_return_forward_warp && warp_id() < first_return_forward_warp + cfg.return_forward_warps)
            return return_forward_chunk(c, warp_id() - first_return_forward_warp);
        if (warp_id() >= first_return_forward_warp) return FlagWarp<Call>(c).run();
    } else {
        MOECOMM_SPAN(push, c.round, threadIdx.x == 0);
        if ((cfg.reduce_warps == 0 || warp_id() < cfg.reduce_warps) && !push(c)) return false;
    }
    MOECOMM_SPAN(pull, c.round, threadIdx.x == cfg.reduce_warps * kWarp);
    if (warp_id() >= cfg.reduce_warps && warp_id() < first_return_forward_warp) return pull(c);
    if constexpr (!cfg.in_place) {
        if (c.all_in_packets) return true;
        MOECOMM_SPAN(flags, c.round, threadIdx.x == first_return_forward_warp * kWarp);
        MOECOMM_SPAN(reduce, c.round, threadIdx.x == 0);
        if constexpr (cfg.domains() == 1) {
            if (warp_id() >= cfg.reduce_warps) return raise_flags(c);
        }
        if (!c.has_reduced_rows() && !await_drained(c, load_relaxed(&own_state(c.a.ctx)->last_combine))) return false;
        if constexpr (cfg.reduce_slots > 0) {
            return reduce_through_ring(c);
        } else {
            return reduce(c);
        }
    }
    return true;
}

// Called by all threads of all blocks. The last block to arrive signals every rank of the domain (release) that this rank has read their
// rows, so that they may be overwritten. Where peers read this rank's rows in place or at reduced_rows, it then waits until all have read
// them, because that memory may be reused when the kernel ends; if the wait fails, the failure record is filled.
//
// Packet-only rounds need no drain signal: a rank reads packets before it sends its next round header, and peers overwrite them only after
// that header. In other rounds every rank signals, even one that received packets alone, because ranks that staged rows wait for all.
template <class Call>
MOECOMM_FN void finish(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    State* state = own_state(c.a.ctx);
    if (c.all_in_packets) return;
    if (!last_block(&state->finished) || c.shared.is_invalid != 0) return;
    MOECOMM_SPAN(drain, c.round, threadIdx.x == 0);
    if (threadIdx.x >= kWarp) return;  // warp_id() would occupy a register from the start of the kernel
    if (lane_id() == 0) state->next_piece = 0;
    for (i32 step = lane_id(); step < cfg.scaleup_ranks(); step += kWarp) {
        const i32 peer = c.domains().neighbor(step);
        const bool masked = is_in(c.shared.masked, peer);
        c.transport.signal(masked ? c.me() : peer, drained_at(c.window(), masked ? peer : c.me()), tag_signal(c.round.tag));
    }
    if (cfg.in_place || c.has_reduced_rows()) {
        await_drained(c, c.round.tag);
    } else if (lane_id() == 0) {
        state->last_combine = c.round.tag;
    }
}

// The kernel's body, for a launch of `workers` blocks of cfg.threads() threads with cfg.shared_bytes of dynamic shared memory.
template <CombineConfig cfg, class Transport>
MOECOMM_FN void combine(const CombineArgs& args) {
    constexpr i32 rings = cfg.return_forward_warps * sizeof(typename Transport::Ring);
    constexpr i32 beside = cfg.domains() > 1 ? sizeof(ScaleoutShared<cfg>) + rings + 256 : 0;
    static_assert(sizeof(CombineShared<cfg>) + beside <= cfg.shared_bytes, "blocks.py and CombineShared disagree");
    static_assert(Transport::all_reachable == (cfg.domains() == 1), "ranks of other domains are put to, and only they");
    extern __shared__ __align__(128) u8 memory[];
    auto& shared = *reinterpret_cast<CombineShared<cfg>*>(memory);
    const CombineArgs& a = shared.args;
    u64 masked = 0;
    if constexpr (cfg.domains() > 1) masked = read_masked(args.ctx);  // arrives while arguments load
    copy_args(shared.args, args, cfg.threads());
    prepare_block<Transport>(shared);
    await_earlier_kernels();
    if constexpr (cfg.domains() > 1) find_forwarders(shared.forwarders, args.ctx, masked, cfg.threads());
    const auto fence_rows_before_header = [&] {  // orders rows that earlier kernels wrote before the round header
        if (cfg.in_place && blockIdx.x < cfg.ranks && threadIdx.x < kHeaderWords) fence_system();
    };
    if constexpr (!cfg.packets) fence_rows_before_header();
    __syncthreads();
    CombineCall<cfg, Transport> c{a, Transport{a.ctx}, {a.ctx, Op::combine, 0}, shared, false};
    bool others = false;  // some source rank's rows do not travel in packets
    for (i32 p = threadIdx.x; p < cfg.ranks; p += cfg.threads()) others = !look_up_source_rank(c, p) || others;
    if (threadIdx.x == cfg.threads() - 1) read_round(a.ctx, shared.begin);
    if (threadIdx.x == cfg.threads() - 2 * kWarp) fill_header(c, shared.mine);  // its warp loads nothing else
    MOECOMM_SPAN(kernel, c.round, threadIdx.x == 0);
    c.all_in_packets = !__syncthreads_or(others);
    c.round.tag = shared.begin.tag;
    if (!begin_round(c.round, shared.begin, cfg.threads())) return;
    if (cfg.packets && !c.all_in_packets) fence_rows_before_header();
    announce(c);
    if constexpr (cfg.own_weights && !cfg.unsummed) {
        if (shared.mine.status == static_cast<u32>(Argument::none)) post_weights(c);
    }
    if constexpr (cfg.domains() > 1) {
        if constexpr (cfg.own_weights) {
            send_tagged_words(c, kHeaderWords, [&](i32 peer) { return put_weights(c, peer); });
        } else {
            send_tagged_words(c, kHeaderWords);
        }
    }
    if constexpr (cfg.domains() > 1) c.leaves_early = leaves_early(c);
    if (__syncthreads_or(!reduce_or_pull(c))) return;
    finish(c);
}

}  // namespace moecomm
