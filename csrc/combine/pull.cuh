// Step 3: the reduced rows of our tokens come home, at most one from each rank, and are added in the order of the ranks.
#pragma once
#include "gather.cuh"

namespace moecomm {

// A warp: waits for every rank's notice and compares it with ours.  False when one did not come; `goes_on` when all agree.
template <class Call>
MOECOMM_FN bool await_notices(const Call& c, bool& goes_on) {
    constexpr CombineConfig cfg = Call::cfg;
    Verdict first{Failure::none, Argument::none, cfg.ranks, 0, 0};  // the first objection this lane has
    bool missing = false;
    for (i32 p = lane_id(); p < cfg.ranks && !missing; p += kWarp) {
        const u64 at = notice_at(c.window(), cfg.ranks, c.round.tag, p);
        u64 tag;
        missing = !wait_flag(c.round, Phase::notice, p, at, c.round.tag, tag);
        if (missing || first.failure != Failure::none) continue;
        const Verdict verdict = judge_notice(c.shared.mine, read_notice(c.a.ctx, at), p, cfg.experts);
        if (verdict.failure != Failure::none) first = verdict;
    }
    if (__any_sync(kAllLanes, missing)) return false;
    const i32 peer = static_cast<i32>(__reduce_min_sync(kAllLanes, static_cast<u32>(first.peer)));
    goes_on = peer == cfg.ranks;
    if (!goes_on && first.peer == peer) report_void(c.round, first);
    return true;
}

// The role of a pull warp.  Lane i serves the i-th rank that holds a part of the token.
template <class Call>
struct Pull {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr Type kType = cfg.staged();
    static constexpr i32 kRowBytes = cfg.staged_bytes();
    static constexpr bool kWeighted = false;

    const Call& c;
    const i32 stride = gridDim.x * cfg.pull_warps;
    i32 token;
    i32 ahead;  // this lane's slot of the next token
    bool failed = false;

    MOECOMM_FN Pull(const Call& call, i32 warp) : c(call), token(blockIdx.x + gridDim.x * warp), ahead(slot_of(token, lane_id())) {}

    MOECOMM_FN i32 slot_of(i32 t, i32 rank) const {
        if (t >= c.a.num_tokens || rank >= cfg.ranks) return -1;
        return reinterpret_cast<const i32*>(c.a.route.token_slot)[static_cast<i64>(t) * cfg.ranks + rank];
    }

    // The rank that this lane serves, and its slot, -1 if none.  At most topk of them, so 32 lanes are enough for all ranks.
    MOECOMM_FN i32 take_slot(i32& rank) {
        rank = lane_id();
        i32 slot = ahead;
        ahead = slot_of(token + stride, lane_id());
        if constexpr (cfg.ranks > kWarp) {
            u64 wanted = __ballot_sync(kAllLanes, slot >= 0);
            wanted |= static_cast<u64>(__ballot_sync(kAllLanes, slot_of(token, kWarp + lane_id()) >= 0)) << kWarp;
            for (i32 i = 0; i < lane_id(); ++i) wanted &= wanted - 1;
            rank = __ffsll(static_cast<i64>(wanted)) - 1;
            slot = rank >= 0 ? slot_of(token, rank) : -1;
        }
        return slot;
    }

    // Waits for the token's rows; the lane that has acquired a row's flag is the one that loads it.
    MOECOMM_FN bool open(Source& source, Item& out) {
        if (failed || token >= c.a.num_tokens) return false;
        i32 rank;
        const i32 slot = take_slot(rank);
        u64 tag;
        bool missing = false;
        if (slot >= 0) {
            const i32 block = (slot - reinterpret_cast<const i32*>(c.a.route.slot_base)[rank]) / kMinChunk;
            missing = !wait_flag(c.round, Phase::reduced, rank, reduced_at(c.window(), rank, block), c.round.tag, tag);
            source.row = c.transport.template peer_ptr<u8>(rank, c.window().staging) + slot * c.pitch();
            fence_async();  // reads of the row come after the flag
        }
        failed = __any_sync(kAllLanes, missing);
        if (failed) return false;
        out = {0, token, 0};
        if (c.a.out_weight_grads != 0) bring_grads();
        token += stride;
        return true;
    }

    // A gradient a lane, from the owner of its expert, whose flag another lane has acquired.
    MOECOMM_FN void bring_grads() const {
        __syncwarp();
        if (lane_id() >= cfg.topk) return;
        const i64 entry = static_cast<i64>(token) * cfg.topk + lane_id();
        const i32 owner = reinterpret_cast<const i32*>(c.a.route.token_owner)[entry];
        u32 grad = 0;
        if (owner >= 0) {
            const u64 row = c.window().staging + slot_of(token, owner) * c.pitch();
            grad = load_relaxed(c.transport.template peer_ptr<const u32>(owner, row + c.grads_at()) + lane_id());
        }
        reinterpret_cast<u32*>(c.a.out_weight_grads)[entry] = grad;
    }

    template <i32 n>
    MOECOMM_FN void store(const Item& out, i32 column, float (&sum)[n]) const {
        const i64 at = column * bytes_of(cfg.type);
        if (c.a.bias != 0) {
            float bias[n];
            load_columns<cfg.type>(reinterpret_cast<const u8*>(c.a.bias) + out.index * c.a.bias_stride + at, bias);
#pragma unroll
            for (i32 i = 0; i < n; ++i) sum[i] = __fadd_rn(sum[i], bias[i]);
        }
        store_columns<cfg.type>(reinterpret_cast<u8*>(c.a.out) + out.index * c.a.out_stride + at, sum);
    }

    MOECOMM_FN void close(const Item&) const {}
};

// By each pull warp.  False when something did not come.
template <class Call>
MOECOMM_FN bool pull(const Call& c) {
    const i32 warp = warp_id() - Call::cfg.reduce_warps;
    bool goes_on;
    if (!await_notices(c, goes_on)) return false;
    if (!goes_on) {
        if (warp == 0 && lane_id() == 0) c.shared.is_void = 1;
        return true;
    }
    Pull<Call> role(c, warp);
    Gather<RowRing<Call::cfg.pull_slots, Call::cfg.pull_bytes>, Pull<Call>>{c.shared.pull[warp], role}.run();
    return !role.failed;
}

}  // namespace moecomm
