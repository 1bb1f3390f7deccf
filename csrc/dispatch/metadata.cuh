// Metadata of rows: source rank and token, expert ids, weights. The metadata warp writes it for a few tokens at once: each store into a
// peer's memory costs its multiprocessor time, however small, and a chunk's flat rows at a rank are neighbors.
#pragma once
#include "call.cuh"

namespace moecomm {

// One lane's entry: the k-th expert of a token.
struct Metadata {
    i32 token, k;  // token -1: no entry
    i32 row, owner;
    float weight;
};

// A source of metadata for this rank's own tokens: their source rank, and their flat rows at the ranks of the domain (-1: none).
template <class Call>
struct Ours {
    const Call& c;
    MOECOMM_FN i32 source() const { return c.me(); }
    MOECOMM_FN i32 slot_at(i32 token, i32 rank) const {
        return reinterpret_cast<const i32*>(c.a.route.token_slot)[static_cast<i64>(token) * Call::cfg.ranks + rank];
    }
};

// Called by a lane with an entry. Flat layout: writes the metadata of the token's row at each rank of the domain; ids and weights of
// experts at other ranks become -1 and 0. `from` is Ours, or Forward::From for tokens that this rank forwards. Cannot fail.
template <class Call, class From>
MOECOMM_FN void write_flat_metadata(const Call& c, const From& from, const Metadata& e, i32 local) {
    constexpr DispatchConfig cfg = Call::cfg;
    for (i32 step = 0; step < cfg.scaleup_ranks(); ++step) {
        const i32 rank = c.domains().neighbor(step);
        const i32 slot = from.slot_at(e.token, rank);
        if (slot < 0) continue;
        const RoundHeader& to = c.shared.headers[rank];
        const bool here = e.owner == rank;
        const i64 at = static_cast<i64>(slot) * cfg.topk + e.k;
        if (to.dispatch.weights != 0) c.transport.template peer_ptr<float>(rank, to.dispatch.weights)[at] = here ? e.weight : 0.0f;
        if (to.dispatch.topk_idx != 0) {
            if constexpr (cfg.idx_bytes == 8) c.transport.template peer_ptr<i64>(rank, to.dispatch.topk_idx)[at] = here ? local : -1;
            if constexpr (cfg.idx_bytes == 4) c.transport.template peer_ptr<i32>(rank, to.dispatch.topk_idx)[at] = here ? local : -1;
        }
        if (e.k == 0 && to.dispatch.src != 0)
            c.transport.template peer_ptr<int2>(rank, to.dispatch.src)[slot] = make_int2(from.source(), e.token);
    }
}

// Called by a lane with an entry. Other layouts: writes the metadata of the entry's row at its owner, and at each rank of the domain the
// rows of the token there, by k. Cannot fail.
template <class Call, class From>
MOECOMM_FN void write_row_metadata(const Call& c, const From& from, const Metadata& e) {
    constexpr DispatchConfig cfg = Call::cfg;
    for (i32 step = 0; step < cfg.scaleup_ranks(); ++step) {
        const i32 rank = c.domains().neighbor(step);
        const i32 slot = from.slot_at(e.token, rank);
        if (slot < 0) continue;
        const i64 at = static_cast<i64>(slot) * cfg.topk + e.k;
        c.transport.template peer_ptr<i32>(rank, c.shared.headers[rank].dispatch.rows)[at] = e.owner == rank ? e.row : -1;
    }
    if (e.owner < 0 || !c.domains().reaches(e.owner)) return;
    const RoundHeader& to = c.shared.headers[e.owner];
    if (to.dispatch.weights != 0) c.transport.template peer_ptr<float>(e.owner, to.dispatch.weights)[e.row] = e.weight;
    if (to.dispatch.src != 0) c.transport.template peer_ptr<int2>(e.owner, to.dispatch.src)[e.row] = make_int2(from.source(), e.token);
}

// Called by all lanes of a warp. Writes the metadata of the tokens [first, end) at the ranks of the domain. The last __syncwarp orders the
// stores for a release by any lane. Cannot fail.
template <class Call>
MOECOMM_FN void write_metadata_of(const Call& c, i32 first, i32 end) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 nth = lane_id() / cfg.topk, k = lane_id() % cfg.topk;
    for (; first < end; first += cfg.tokens_per_step()) {
        const i32 token = first + nth;
        if (nth >= cfg.tokens_per_step() || token >= end) continue;
        const i64 entry = static_cast<i64>(token) * cfg.topk + k;
        const Metadata e{token, k, reinterpret_cast<const i32*>(c.a.route.token_rows)[entry],
                         reinterpret_cast<const i32*>(c.a.route.token_owner)[entry], c.weight_at(entry)};
        if constexpr (cfg.layout == Layout::flat) {
            write_flat_metadata(c, Ours<Call>{c}, e, e.owner >= 0 ? c.local_at(entry, e.owner) : -1);
        } else {
            write_row_metadata(c, Ours<Call>{c}, e);
        }
    }
    __syncwarp();
}

}  // namespace moecomm
