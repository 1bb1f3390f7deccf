// Step 5 where rows are fetched later (csrc/fused/fetch.cuh): a slip for every entry among the rows of its expert, and one flag a rank.
//
// In a Buffer of many tokens slips go straight to their rows at the owner, once counts are known, and the flag follows them.  In one of few
// every rank tells all others its ids, with its counts: a flight over the links, and not two.  Who has the expert makes the slip.
#pragma once
#include "../protocol/row_descriptor.h"
#include "rank.cuh"

namespace moecomm {

// In the place of a Sender: nothing is loaded ahead.
template <class Call>
struct PublishedRows {
    const Call& c;

    MOECOMM_FN explicit PublishedRows(const Call& call) : c(call) {}
    MOECOMM_FN void load_next() const {}
    MOECOMM_FN void drop_loads() const {}
};

template <class Call>
MOECOMM_FN i32 owner_of(i64 id) {
    return id >= 0 && valid_id(id, Call::cfg.experts) ? static_cast<i32>(id) / Call::cfg.experts_here() : -1;
}

// By all threads, of the block's tokens, those that a warp has a lane for each entry of together.  Of an expert they take rows as they
// come: what is made of a row does not depend on which it is.
template <class Call>
MOECOMM_FN void store_descriptors(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    static_assert(cfg.row_bytes == sizeof(RowDescriptor) && cfg.layout == Layout::expert && !cfg.quantize && !cfg.repeat,
                  "rows of experts");
    constexpr i32 kTokens = kWarp / cfg.topk, kWarps = cfg.threads() / kWarp;
    const u64 product_bytes = cfg.hidden * bytes_of(cfg.type);
    const i32 lane = lane_id(), first = lane / cfg.topk * cfg.topk;  // lane of its token
    auto* owners = reinterpret_cast<i32*>(c.a.route.token_owner);
#pragma unroll 2
    for (i32 token = c.share.first + warp_id() * kTokens; token < c.share.end; token += kWarps * kTokens) {
        const i32 of = token + lane / cfg.topk, entry = token * cfg.topk + lane;
        const bool here = lane < kTokens * cfg.topk && of < c.share.end;
        const i64 id = here ? c.id_at(entry) : -1;
        const i32 owner = owner_of<Call>(id);
        if (here) owners[entry] = owner;
        const i32 row = owner < 0 ? 0 : row_inside(c, owner, atomicAdd(&c.shared.base[id], 1));
        i32 same = row;
#pragma unroll
        for (i32 k = 0; k < cfg.topk; ++k) {
            const i32 other = __shfl_sync(kAllLanes, owner, first + k), there = __shfl_sync(kAllLanes, row, first + k);
            if (other == owner) same = min(same, there);
        }
        if (owner < 0) continue;
        *(c.transport.template peer_ptr<RowDescriptor>(owner, c.shared.headers[owner].x) + row) =
            RowDescriptor::of(c.a.x + of * c.a.x_stride, same < row ? same : -1, c.a.receive_buffer + entry * product_bytes, c.me());
    }
}

// Where ids are told: words that combines have for weights, in rounds of their own.
static_assert(kMostWeights <= kAloneEntries, "every block counts all tokens");
template <class Call>
MOECOMM_FN bool publishes_ids(const Call& c) {
    return takes_weights(c.shape());
}
template <class Call>
MOECOMM_FN u64 id_place(const Call& c, i32 source, i32 entry) {
    return weight_at(c.window(), c.shape(), c.round.tag, source, entry);
}
// By all threads, of the block's tokens.
template <class Call>
MOECOMM_FN void publish_ids(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    auto* owners = reinterpret_cast<i32*>(c.a.route.token_owner);
    for (i32 entry = c.share.first * cfg.topk + threadIdx.x; entry < c.share.end * cfg.topk; entry += cfg.threads()) {
        const i64 id = c.id_at(entry);
        owners[entry] = owner_of<Call>(id);
        for (i32 step = 0; step < cfg.ranks; ++step)
            c.transport.post(rotated<cfg.ranks>(c.me(), step), id_place(c, c.me(), entry), word_signal(c.round.tag, static_cast<u32>(id)));
    }
}
// By one block: of the tokens of `source`.  False where some did not come.
template <class Call>
MOECOMM_FN bool take_ids(const Call& c, i32 source) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 here = cfg.experts_here();
    const RoundHeader& from = c.shared.headers[source];
    const u64 product_bytes = cfg.hidden * bytes_of(cfg.type);
    i32* const next = c.shared.base + c.me() * here;  // row, of each expert here
    for (i32 i = threadIdx.x; i < here; i += cfg.threads())
        next[i] = c.shared.filled[i] - c.shared.total[c.me() * here + i] + c.shared.into[source * here + i];
    __syncthreads();
    auto* const descriptors = reinterpret_cast<RowDescriptor*>(c.a.ctx.peers[c.me()] + c.a.out_x);
    const i32 thread = threadIdx.x, mine = ceil_div(max(from.num_tokens * cfg.topk - thread, 0), cfg.threads());
    const bool came = await_words(
        c.round, id_place(c, source, thread), cfg.threads() * sizeof(u64), mine, [&](i32) { return source; }, [](i32) { return false; },
        [&](i32 nth, u32 id) {
            const i32 entry = thread + nth * cfg.threads(), expert = static_cast<i32>(id) - c.me() * here;
            if (expert < 0 || expert >= here) return;
            const i32 row = min(atomicAdd(&next[expert], 1), c.a.max_rows - 1);  // see row_inside
            descriptors[row] =
                RowDescriptor::of(from.src + entry / cfg.topk * from.topk_idx, -1, from.weights + entry * product_bytes, source);
        });
    return !__syncthreads_or(!came);
}

// By the threads of a block: a flag to every rank.
template <class Call>
MOECOMM_FN void signal_all(const Call& c) {
    for (i32 step = threadIdx.x; step < Call::cfg.ranks; step += Call::cfg.threads()) {
        const i32 peer = rotated<Call::cfg.ranks>(c.me(), step);
        c.transport.signal(peer, arrived_at(c.window(), c.shape(), c.me(), 0), chunk_signal(c.round.tag, 0, 0));
    }
}
// By those of one block: our rows are where they are fetched from.
template <class Call>
MOECOMM_FN void signal_published(const Call& c) {
    await_earlier_kernels();
    fence_system();
    signal_all(c);
}
// By all threads of all blocks: once everybody has stored here, and our rows are where they are fetched from, every rank hears of it.
template <class Call>
MOECOMM_FN void signal_descriptors(const Call& c) {
    await_earlier_kernels();
    fence_system();
    if (last_block(&own_state(c.a.ctx)->finished)) signal_all(c);
}

// By one block: those of all ranks are here.
template <class Call>
MOECOMM_FN void await_descriptors(const Call& c) {
    for (i32 source = threadIdx.x; source < Call::cfg.ranks; source += Call::cfg.threads()) {
        u64 seen;
        if (!wait_flag(c.round, Phase::payload, source, arrived_at(c.window(), c.shape(), source, 0), c.round.tag, seen)) return;
    }
}

}  // namespace moecomm
