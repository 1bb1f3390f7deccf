// One token to be sent: what each lane of its warp knows about it.
#pragma once
#include "call.cuh"

namespace moecomm {

// Lane l holds the token's flat rows at the ranks l, l + 32, ... steps after this rank (rotated), and its entry k = l.
template <class Call>
struct Token {
    i32 index;
    i32 slot[Call::cfg.peers_per_lane()];
    i32 row, owner;  // of this lane's entry; owner -1: none
};

// Called by all lanes of a warp. Loads a token of this rank from the route.
template <class Call>
MOECOMM_FN Token<Call> load_token(const Call& c, i32 index) {
    constexpr DispatchConfig cfg = Call::cfg;
    Token<Call> token{index, {}, -1, -1};
#pragma unroll
    for (i32 i = 0; i < cfg.peers_per_lane(); ++i) {
        const i32 step = i * kWarp + lane_id();
        const auto* slots = reinterpret_cast<const i32*>(c.a.route.token_slot) + static_cast<i64>(index) * cfg.ranks;
        token.slot[i] = step < cfg.ranks ? slots[rotated<cfg.ranks>(c.me(), step)] : -1;
    }
    if (cfg.layout == Layout::flat || lane_id() >= cfg.topk) return token;
    const i64 entry = static_cast<i64>(index) * cfg.topk + lane_id();
    token.row = reinterpret_cast<const i32*>(c.a.route.token_rows)[entry];
    token.owner = reinterpret_cast<const i32*>(c.a.route.token_owner)[entry];
    return token;
}

// Called by all lanes of a warp. Calls body(rank, flat row, row of the payload, lane, i) with all lanes for each rank that wants the token;
// token.slot[i] of `lane` is the flat row.
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

}  // namespace moecomm
