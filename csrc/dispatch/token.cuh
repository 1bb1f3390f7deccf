// One token on its way: what the lanes of its warp know of it, and what it leaves beside its rows at each rank.
#pragma once
#include "call.cuh"

namespace moecomm {

// Lane l knows the flat rows of the token at the ranks l, l + 32 places after ours (rotated), and its entry k = l.
template <class Call>
struct Token {
    i32 index;
    i32 slot[Call::cfg.peers_per_lane()];
    i32 row, owner;  // of the entry; owner -1: none
    i32 local;       // flat: expert of the entry at its owner
    float weight;
};

template <class Call>
MOECOMM_FN Token<Call> load_token(const Call& c, i32 index) {
    constexpr DispatchConfig cfg = Call::cfg;
    Token<Call> token{index, {}, -1, -1, -1, 0.0f};
#pragma unroll
    for (i32 i = 0; i < cfg.peers_per_lane(); ++i) {
        const i32 turn = i * kWarp + lane_id();
        const auto* slots = reinterpret_cast<const i32*>(c.a.route.token_slot) + static_cast<i64>(index) * cfg.ranks;
        token.slot[i] = turn < cfg.ranks ? slots[rotated<cfg.ranks>(c.me(), turn)] : -1;
    }
    if (lane_id() >= cfg.topk) return token;
    const i64 entry = static_cast<i64>(index) * cfg.topk + lane_id();
    token.row = reinterpret_cast<const i32*>(c.a.route.token_rows)[entry];
    token.owner = reinterpret_cast<const i32*>(c.a.route.token_owner)[entry];
    if constexpr (!cfg.repeat) {
        token.weight = c.weight_at(entry);
        if constexpr (cfg.layout == Layout::flat) {
            const i32 id = static_cast<i32>(c.id_at(entry));
            token.local = id >= 0 ? id % cfg.experts_here() : -1;
        }
    }
    return token;
}

// By all lanes, for each rank that wants the token: body(rank, its flat row, the row of its payload, the lane and place of its slot).
template <class Call, class Body>
MOECOMM_FN void for_ranks(const Call& c, const Token<Call>& token, Body body) {
    constexpr DispatchConfig cfg = Call::cfg;
#pragma unroll
    for (i32 i = 0; i < cfg.peers_per_lane(); ++i) {
        for (u32 wanted = __ballot_sync(kAllLanes, token.slot[i] >= 0); wanted != 0; wanted &= wanted - 1) {
            const i32 lane = __ffs(wanted) - 1, rank = rotated<cfg.ranks>(c.me(), i * kWarp + lane);
            const i32 slot = __shfl_sync(kAllLanes, token.slot[i], lane);
            i32 row = slot;
            if constexpr (cfg.layout != Layout::flat)  // the first of the token's rows there
                row = __shfl_sync(kAllLanes, token.row, __ffs(__ballot_sync(kAllLanes, token.owner == rank)) - 1);
            body(rank, slot, row, lane, i);
        }
    }
}

// Whose row it is, which experts, which weights: flat, where they stand beside the row.
template <class Call>
MOECOMM_FN void describe_flat(const Call& c, const Token<Call>& token, i32 rank, i32 slot) {
    constexpr DispatchConfig cfg = Call::cfg;
    const Notice& to = c.shared.notices[rank];
    const bool here = token.owner == rank;
    const i64 entry = static_cast<i64>(slot) * cfg.topk + lane_id();
    if (lane_id() < cfg.topk) {
        if (to.weights != 0) c.transport.template peer_ptr<float>(rank, to.weights)[entry] = here ? token.weight : 0.0f;
        const i32 local = here ? token.local : -1;
        if (to.topk_idx != 0) {
            if constexpr (cfg.idx_bytes == 8) c.transport.template peer_ptr<i64>(rank, to.topk_idx)[entry] = local;
            if constexpr (cfg.idx_bytes == 4) c.transport.template peer_ptr<i32>(rank, to.topk_idx)[entry] = local;
        }
    }
    if (lane_id() == 0 && to.src != 0) c.transport.template peer_ptr<int2>(rank, to.src)[slot] = make_int2(c.me(), token.index);
}

// The same where every entry has a row of its own, and the rows of the token there, by k.
template <class Call>
MOECOMM_FN void describe_rows(const Call& c, const Token<Call>& token, i32 rank, i32 slot) {
    constexpr DispatchConfig cfg = Call::cfg;
    const Notice& to = c.shared.notices[rank];
    const bool here = token.owner == rank;
    if (lane_id() < cfg.topk) {
        const i64 entry = static_cast<i64>(slot) * cfg.topk + lane_id();
        c.transport.template peer_ptr<i32>(rank, to.rows)[entry] = here ? token.row : -1;
    }
    if (!here) return;
    if (to.weights != 0) c.transport.template peer_ptr<float>(rank, to.weights)[token.row] = token.weight;
    if (to.src != 0) c.transport.template peer_ptr<int2>(rank, to.src)[token.row] = make_int2(c.me(), token.index);
}

template <class Call>
MOECOMM_FN void describe(const Call& c, const Token<Call>& token, i32 rank, i32 slot) {
    if constexpr (Call::cfg.repeat) return;
    if constexpr (Call::cfg.layout == Layout::flat) {
        describe_flat(c, token, rank, slot);
    } else {
        describe_rows(c, token, rank, slot);
    }
}

}  // namespace moecomm
