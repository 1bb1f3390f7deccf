// Dispatch: one kernel from routing ids to rows at the owners of the experts; a split dispatch has a second kernel that waits for rows. The
// steps are those of csrc/host/dispatch.cpp.
//
// The grid has at most as many blocks as there are multiprocessors, so that all blocks are resident. Blocks divide this rank's chunks of
// tokens. Where arrived rows need more work (replication, scales by column), some warps of each block receive while others send.
#pragma once
#include "agree.cuh"
#include "announce.cuh"
#include "descriptors.cuh"
#include "outputs.cuh"
#include "place.cuh"
#include "receive.cuh"
#include "scaleout_early.cuh"
#include "scaleout_forward.cuh"
#include "send.cuh"
#include "unpack.cuh"

namespace moecomm {

// Called by all threads before the block's first __syncthreads, while arguments load. Initializes mbarriers and shared counters. The loops
// run once or twice; unrolled they were a quarter of the code of a kernel for few tokens, and instruction fetches cost time, too.
template <class Shared, class Call>
MOECOMM_FN void prepare_block(Shared& shared, const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
#pragma unroll 1
    for (i32 i = threadIdx.x; i < (cfg.descriptors ? 0 : cfg.send_warps * cfg.ring_slots); i += cfg.threads())
        barrier_init(cfg.packets ? &shared.packets[i / cfg.ring_slots].full[i % cfg.ring_slots] : &shared.full[0][0] + i, 1);
#pragma unroll 1
    for (i32 i = threadIdx.x; i < (cfg.replicates() ? cfg.receive_warps * cfg.replicate_slots : 0); i += cfg.threads())
        barrier_init(&shared.replicate[i / cfg.replicate_slots].full[i % cfg.replicate_slots], 1);
    if constexpr (cfg.domains() > 1) {
        for (i32 i = threadIdx.x; i < cfg.forward_warps * cfg.forward_slots; i += cfg.threads())
            barrier_init(&c.forward_rings()[i / cfg.forward_slots].full[i % cfg.forward_slots], 1);
        for (i32 i = threadIdx.x; i < cfg.put_warps; i += cfg.threads()) c.transport.prepare(c.put_rings()[i]);
    }
#pragma unroll 1
    for (i32 i = threadIdx.x; i < kOpenSteps; i += cfg.threads()) shared.chunk_steps.done[i] = 0;
    if (threadIdx.x == 0) {
        shared.bad = 0;
        shared.first_error = 2 * cfg.ranks;
    }
    if constexpr (!cfg.repeat && cfg.send_warps > 0) clear_counters(shared, c);
    barrier_init_done();
}

// Called by all threads of all blocks after the round was found valid. Gives each warp its role: send, receive, metadata, flag, put or
// forward. A role whose wait fails returns early; the failure record is filled.
template <class Call>
MOECOMM_FN void move_rows(const Call& c, Sender<Call>& sender) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 first_receive_warp = cfg.send_warps, first_metadata_warp = first_receive_warp + cfg.receive_warps,
                  first_flag_warp = first_metadata_warp + cfg.metadata_warps;
    constexpr i32 first_forward_warp = first_flag_warp + cfg.flag_warps, first_put_warp = first_forward_warp + cfg.forward_warps;
    if (c.in_team()) finalize_share(c);
    if constexpr (cfg.domains() > 1 && cfg.part == Part::begin) {
        if (blockIdx.x == 0) save_headers(c);
    }
    if (warp_id() < first_receive_warp) {
        MOECOMM_SPAN(send, c.round, threadIdx.x == 0);
        send(c, sender);
        if (blockIdx.x == 0) write_counts(c);
        clear_padding(c);
    } else if (warp_id() < first_metadata_warp) {
        MOECOMM_SPAN(receive, c.round, threadIdx.x == first_receive_warp * kWarp);
        receive(c);
    } else if (warp_id() < first_flag_warp) {
        MOECOMM_SPAN(metadata, c.round, threadIdx.x == first_metadata_warp * kWarp);
        if constexpr (cfg.metadata_warps > 0) write_metadata(c);
        clear_unused(c, c.shared.needed[c.me()], blockIdx.x * kWarp + lane_id(), gridDim.x * kWarp);  // rows are still in flight
    } else if (cfg.domains() == 1 || warp_id() < first_forward_warp) {
        MOECOMM_SPAN(flags, c.round, threadIdx.x == first_flag_warp * kWarp);
        raise_flags(c);
    } else if constexpr (cfg.domains() > 1) {
        MOECOMM_SPAN(put, c.round, threadIdx.x == first_put_warp * kWarp && !c.leaves_early());
        MOECOMM_SPAN(forward, c.round, threadIdx.x == first_forward_warp * kWarp);
        warp_id() < first_put_warp ? forwarder(c, warp_id() - first_forward_warp) : put_send_slots(c, warp_id() - first_put_warp);
    }
    if constexpr (cfg.receive_warps == 0 && cfg.part == Part::whole) {
        MOECOMM_SPAN(receive, c.round, threadIdx.x == 0);
        await_all(c);
    }
}

// agree(), called by all threads. The others learn what the team found, without delaying it.
template <class Call>
MOECOMM_FN bool agree_in_team(const Call& c) {
    constexpr i32 threads = Call::cfg.threads();
    if (Call::kTeam == threads) return agree(c);
    if (!c.in_team()) {
        barrier_sync(4, threads);
        return c.shared.agreed;
    }
    const bool agreed = agree(c);
    if (c.team_thread() == 0) c.shared.agreed = agreed;
    barrier_arrive(4, threads);
    return agreed;
}

// Called by every thread of every block. If a wait fails, the failure record is filled, all blocks return, and this rank begins no further
// round. The overloads below have the same contract.
template <class Call>
MOECOMM_FN void run(const Call& c, Sender<Call>& sender) {
    constexpr DispatchConfig cfg = Call::cfg;
    if (!begin_round(c.round, c.shared.begin, cfg.threads())) return;
    if constexpr (!cfg.repeat) {
        if (!c.counts_all && !sum_blocks(c, [&] { sender.cast_ahead(1); })) return;
    }
    if (c.in_team()) announce(c);
    if constexpr (cfg.domains() > 1) send_tagged_words(c, kHeaderWords + (cfg.repeat ? 0 : cfg.columns()));
    place_share(c);
    if constexpr (cfg.domains() > 1 && cfg.part == Part::whole && cfg.send_warps > 0) {
        if (c.leaves_early()) leave_early(c, sender);
    }
    if (!c.leaves_early()) sender.cast_ahead(sender.kPieces);
    if (!agree_in_team(c)) return;
    if (!is_valid_round(c)) {
        clear_route(c);
        return;
    }
    move_rows(c, sender);
    if constexpr (cfg.packet_lines > 0) unpack_apart(c);
}

// Few tokens: send warps send packets at once, while the team (all other warps) agrees. Named barrier 2 then joins them. The last send
// warp, which has fewest packets, joins by barrier 3, so that nobody waits for it: in block 0 it times the headers.
template <class Call>
MOECOMM_FN void run(const Call& c, Packets<Call>& packets) {
    constexpr DispatchConfig cfg = Call::cfg;
    if (!begin_round(c.round, c.shared.begin, cfg.threads())) return;
    constexpr i32 last = cfg.send_warps - 1, joined = cfg.threads() - kWarp, joined_late = Call::kTeam + kWarp;
    const bool sends = warp_id() < cfg.send_warps;
    bool agreed;
    if (sends) {
        MOECOMM_SPAN(send, c.round, threadIdx.x == 0);
        packets.send_all();
        if (blockIdx.x == 0 && warp_id() == last)
            for (i32 peer = lane_id(); peer < cfg.ranks; peer += kWarp) time_header(c.round, peer);
        warp_id() == last ? barrier_sync(3, joined_late) : barrier_sync(2, joined);
        agreed = c.shared.agreed;
    } else {
        announce(c);
        agreed = agree(c);
        if (c.team_thread() == 0) c.shared.agreed = agreed;
        if (last > 0) barrier_arrive(2, joined);
        barrier_arrive(3, joined_late);
    }
    launch_dependents();
    if (!agreed) return;
    if (!is_valid_round(c)) {
        clear_route(c);
        return;
    }
    if (sends) {
        if (warp_id() == 0) place_all_tokens(c);
        if (blockIdx.x == 0) write_counts<false>(c);
        clear_padding(c);
    } else {
        // block 0 does not unpack, unless it is the only one, and then this warp begins to unpack last
        if (blockIdx.x == 0 && c.team_warp() == Call::kTeamWarps - 1) count_rows(c);
        if (some_chunks(c) && !receive(c)) return;
    }
    unpack(c);
    // by the blocks that sent and do not unpack
    const i32 threads = c.senders * cfg.threads(), thread = blockIdx.x * cfg.threads() + threadIdx.x;
    if (thread < threads) clear_unused(c, c.shared.needed[c.me()], thread, threads);
}

// Fused layers: row descriptors travel in place of rows. Earlier kernels of the stream may still be running.
template <class Call>
MOECOMM_FN void run(const Call& c, const DescriptorSender<Call>&) {
    if (!begin_round(c.round, c.shared.begin, Call::cfg.threads())) return;
    if (!c.counts_all && !sum_blocks(c, [] {})) return;
    announce(c);
    const bool ids = publishes_ids(c);
    if (ids) {
        publish_ids(c);
        if (blockIdx.x == gridDim.x - 1) signal_published(c);
    }
    if (!agree(c)) return;
    launch_dependents();
    if (!is_valid_round(c)) {
        clear_route(c);
        return;
    }
    if (blockIdx.x == gridDim.x - 1) write_counts(c);
    MOECOMM_SPAN(send, c.round, threadIdx.x == 0);
    if (ids) {
        for (i32 source = blockIdx.x; source < Call::cfg.ranks; source += gridDim.x)
            if (!make_descriptors(c, source)) return;
    } else {
        store_descriptors(c);
        signal_descriptors(c);
    }
    if (blockIdx.x == 0) await_descriptors(c);
}

// Copy the table of slots to shared memory. Called by all threads of a block; a __syncthreads follows. Needs no wait for earlier kernels:
// the one that writes the table lets no later one begin before it has (set_placement). Bypasses L1, which may hold an earlier table.
template <i32 threads, class Shared>
MOECOMM_FN void copy_placement(Shared& shared, const Context& ctx) {
    constexpr i32 words = Shared::kWords, together = words > 3 * threads ? 4 : ceil_div(words, threads);  // loads of a thread in flight
    const u32* const table = own<const u32>(ctx, placement_at(ctx.window));
#pragma unroll 1
    for (i32 first = threadIdx.x; first < words; first += together * threads) {
        u32 held[together];
#pragma unroll
        for (i32 i = 0; i < together; ++i)
            if (first + i * threads < words) held[i] = load_relaxed(table + first + i * threads);
#pragma unroll
        for (i32 i = 0; i < together; ++i)
            if (first + i * threads < words) shared.placement[first + i * threads] = held[i];
    }
}

// Called first by all threads of either kernel. Copies arguments, initializes shared memory, and ends in a __syncthreads. The result has no
// round tag and no share yet.
template <DispatchConfig cfg, class Transport>
MOECOMM_FN DispatchCall<cfg, Transport> begin_call(const DispatchArgs& args) {
    constexpr i32 rings = cfg.forward_warps * sizeof(ForwardRing<cfg>) + cfg.put_warps * sizeof(typename Transport::Ring);
    constexpr i32 beside = cfg.domains() > 1 ? rings + 128 : 0;
    static_assert(sizeof(DispatchShared<cfg>) + beside <= cfg.shared_bytes, "blocks.py and DispatchShared disagree");
    extern __shared__ __align__(128) u8 memory[];
    auto& shared = *reinterpret_cast<DispatchShared<cfg>*>(memory);
    const DispatchArgs& a = shared.args;
    u64 masked = 0;
    if constexpr (cfg.domains() > 1) masked = read_masked(args.ctx);  // arrives while arguments load
    if constexpr (cfg.placed && !cfg.balanced) copy_placement<cfg.threads()>(shared, args.ctx);
    copy_args(shared.args, args, cfg.threads());
    const DispatchCall<cfg, Transport> c{a, Transport{a.ctx}, {a.ctx, Op::dispatch, 0}, shared, {}, false, static_cast<i32>(gridDim.x)};
    prepare_block(shared, c);
    // DescriptorSender needs no wait: the previous kernel waited for all kernels before it, and writes nothing that is read here
    // (fused/publish.cuh). Where it reads slots, a kernel that chooses them lies between.
    if constexpr (!cfg.descriptors || cfg.balanced) await_earlier_kernels();
    if constexpr (cfg.domains() > 1) find_forwarders(shared.forwarders, args.ctx, masked, cfg.threads());
    __syncthreads();
    return c;
}

// How rows travel: Sender, Packets or DescriptorSender.
template <class Call, bool packets, bool descriptors>
struct ChooseMoves {
    using Type = Sender<Call>;
};
template <class Call>
struct ChooseMoves<Call, true, false> {
    using Type = Packets<Call>;
};
template <class Call>
struct ChooseMoves<Call, false, true> {
    using Type = DescriptorSender<Call>;
};
template <class Call>
using Moves = typename ChooseMoves<Call, Call::cfg.packets, Call::cfg.descriptors>::Type;

// The most blocks that send where a token may have several rows at a rank. They fill the links, yet keep so few rows in flight that chunks
// are complete soon. Rows cast to values of a byte are half as long, so fewer blocks send them; a cast to 4 bits takes longer. All blocks
// receive.
MOECOMM_BOTH constexpr i32 replicate_senders(bool casts_to_bytes) { return casts_to_bytes ? 48 : 64; }

// The kernel's body, for a launch of `workers` blocks of cfg.threads() threads with cfg.shared_bytes of dynamic shared memory.
template <DispatchConfig cfg, class Transport>
MOECOMM_FN void dispatch(const DispatchArgs& args) {
    static_assert(Transport::all_reachable == (cfg.domains() == 1), "ranks of other domains are put to, and only they");
    auto c = begin_call<cfg, Transport>(args);
    auto& shared = c.shared;
    const DispatchArgs& a = c.a;
    if (cfg.packets) {
        c.senders = ceil_div(c.senders, 3);
    } else if (cfg.replicates()) {
        c.senders = min(c.senders, replicate_senders(cfg.quantize && !is_e2m1(cfg.format)));
    }
    if (cfg.domains() > 1) c.senders = min(c.senders, ring_chunks(c.shape(), a.chunk_tokens));  // each has a place for its first chunk
    c.share = share_of_block(a.num_tokens, a.chunk_tokens, c.senders);
    MOECOMM_SPAN(kernel, c.round, threadIdx.x == 0);
    c.counts_all = cfg.packets || gridDim.x == 1 || a.num_tokens * cfg.topk <= kCountAllEntries;
    Moves<DispatchCall<cfg, Transport>> moves(c);
    for (i32 i = 0; i < cfg.slots_ahead() && warp_id() < cfg.send_warps; ++i) moves.load_next();
    if (threadIdx.x == cfg.threads() - 1) read_round(a.ctx, shared.begin);
    if (threadIdx.x == cfg.threads() - (cfg.repeat ? 2 : 1) * kWarp) fill_header(c, shared.mine);  // a repeat loads here
    if constexpr (!cfg.repeat) count(c);
    __syncthreads();
    c.round.tag = shared.begin.tag;
    run(c, moves);
    if (warp_id() < cfg.send_warps) moves.drop_loads();
    if constexpr (cfg.descriptors) await_earlier_kernels();  // or the next kernel in the stream could begin before they end
}

// The body of the second kernel of a split dispatch. Waits for the rows for which the first has not waited; forwards, replicates or places
// them. Called by all threads of all blocks; if a wait fails, the failure record is filled.
template <DispatchConfig cfg, class Transport>
MOECOMM_FN void dispatch_end(const DispatchArgs& args) {
    auto c = begin_call<cfg, Transport>(args);
    auto& shared = c.shared;
    const DispatchArgs& a = c.a;
    if (threadIdx.x == 0) {
        read_round(a.ctx, shared.begin);
        shared.begin.tag = load_relaxed(&own_state(a.ctx)->last_dispatch);
    }
    if constexpr (cfg.domains() > 1) {
        load_headers(c);
        __syncthreads();
    }
    for (i32 p = threadIdx.x; p < cfg.ranks; p += cfg.threads()) {
        const auto* sent = reinterpret_cast<const SourceTokens*>(a.route.sent) + p;
        // 1 block: the order of arrival in a domain does not matter any more
        shared.sources[p] = {sent->num_tokens, sent->chunk_tokens, cfg.domains() > 1 ? shared.headers[p].blocks : 1, false};
    }
    __syncthreads();
    c.round.tag = shared.begin.tag;
    if (c.round.tag == 0) return;  // the dispatch was invalid
    MOECOMM_SPAN(receive, c.round, threadIdx.x == 0);
    if (!not_aborted(c.round, shared.begin, Phase::payload)) return;
    if constexpr (cfg.domains() > 1) {
        constexpr i32 forwarders = cfg.warps() - cfg.forward_warps;
        if (warp_id() >= forwarders) forwarder(c, warp_id() - forwarders);
        if (warp_id() >= forwarders && !(cfg.layout == Layout::flat && !cfg.scale_columns)) return;
    }
    if constexpr (cfg.layout == Layout::flat && !cfg.scale_columns) {
        await_all(c);
    } else {
        receive(c);
    }
}

}  // namespace moecomm
