// Step 5 where rows are fetched later (csrc/fused/fetch.cuh): a row descriptor for every entry, among the rows of its expert, and one
// signal for each rank.
//
// In a Buffer of many tokens, the source rank stores row descriptors directly at their rows at the owner, once counts are known; the signal
// follows. In a Buffer of few tokens, every rank sends its ids to all peers together with its counts, which takes one link latency instead
// of two; the owner of the expert then makes the row descriptor.
#pragma once
#include "../protocol/row_descriptor.h"
#include "place.cuh"

namespace moecomm {

// Takes the place of a Sender; loads nothing ahead.
template <class Call>
struct DescriptorSender {
    const Call& c;

    MOECOMM_FN explicit DescriptorSender(const Call& call) : c(call) {}
    MOECOMM_FN void load_next() const {}
    MOECOMM_FN void drop_loads() const {}
};

// Returns the owner of an expert id, -1 if the id is -1 or out of range.
template <class Call>
MOECOMM_FN i32 owner_of(i64 id) {
    return id >= 0 && valid_id(id, Call::cfg.experts) ? Call::cfg.ranges().owner(static_cast<i32>(id)) : -1;
}

// Called by all threads, after agree(). Stores the row descriptors of the block's tokens at their owners; a warp handles as many tokens as
// it has lanes for their entries. Rows of an expert are assigned in any order (atomicAdd): the values of a row do not depend on its index.
// Cannot fail.
template <class Call>
MOECOMM_FN void store_descriptors(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    static_assert(cfg.row_bytes == sizeof(RowDescriptor) && cfg.layout == Layout::expert && !cfg.quantize && !cfg.repeat,
                  "rows of experts");
    constexpr i32 kTokens = kWarp / cfg.topk, kWarps = cfg.threads() / kWarp;
    const u64 product_bytes = cfg.hidden * bytes_of(cfg.type);
    const i32 lane = lane_id(), first = lane / cfg.topk * cfg.topk;  // first lane of this lane's token
    auto* owners = reinterpret_cast<i32*>(c.a.route.token_owner);
#pragma unroll 2
    for (i32 token = c.share.first + warp_id() * kTokens; token < c.share.end; token += kWarps * kTokens) {
        const i32 of = token + lane / cfg.topk, entry = token * cfg.topk + lane;
        const bool here = lane < kTokens * cfg.topk && of < c.share.end;
        const i64 id = here ? c.expert_at(entry) : -1;
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
        *(c.transport.template peer_ptr<RowDescriptor>(owner, c.shared.headers[owner].published.descriptors) + row) =
            RowDescriptor::of(c.a.x + of * c.a.x_stride, same < row ? same : -1, c.a.result_rows + entry * product_bytes, c.me());
    }
}

// A Buffer of few tokens publishes ids through the words in which combines receive weights. A dispatch and a combine are separate rounds,
// so the words do not collide.
static_assert(kMostWeights <= kCountAllEntries, "every block counts all tokens");
template <class Call>
MOECOMM_FN bool publishes_ids(const Call& c) {
    return takes_weights(c.shape());
}
template <class Call>
MOECOMM_FN u64 id_place(const Call& c, i32 source, i32 entry) {
    return weight_at(c.window(), c.shape(), c.round.tag, source, entry);
}
// Called by all threads. Posts the ids of the block's tokens to every rank, as tagged words. Cannot fail.
template <class Call>
MOECOMM_FN void publish_ids(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    auto* owners = reinterpret_cast<i32*>(c.a.route.token_owner);
    for (i32 entry = c.share.first * cfg.topk + threadIdx.x; entry < c.share.end * cfg.topk; entry += cfg.threads()) {
        const i64 id = c.expert_at(entry);
        owners[entry] = owner_of<Call>(id);
        for (i32 step = 0; step < cfg.ranks; ++step)
            c.transport.post(rotated<cfg.ranks>(c.me(), step), id_place(c, c.me(), entry), word_signal(c.round.tag, static_cast<u32>(id)));
    }
}
// Called by all threads of a block, after agree(). Waits for the ids of `source` and makes the row descriptors of this rank's experts.
// Returns false to all threads if some ids did not arrive; the failure record is filled.
template <class Call>
MOECOMM_FN bool make_descriptors(const Call& c, i32 source) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 most = cfg.ranges().most();
    const i32 here = c.experts_here();
    const RoundHeader& from = c.shared.headers[source];
    const u64 product_bytes = cfg.hidden * bytes_of(cfg.type);
    i32* const next = c.shared.base + c.first_expert();  // the next row of each expert here
    for (i32 i = threadIdx.x; i < here; i += cfg.threads())
        next[i] = c.shared.filled[i] - c.shared.total[c.first_expert() + i] + c.shared.into[source * most + i];
    __syncthreads();
    auto* const descriptors = reinterpret_cast<RowDescriptor*>(c.a.ctx.peers[c.me()] + c.a.out_x);
    const i32 thread = threadIdx.x, mine = ceil_div(max(from.num_tokens * cfg.topk - thread, 0), cfg.threads());
    const bool in_time = await_words<8>(
        c.round, Phase::header, mine, [&](i32 nth) { return id_place(c, source, thread) + nth * cfg.threads() * sizeof(u64); },
        [&](i32) { return source; }, [](i32) { return false; },
        [&](i32 nth, u32 id) {
            const i32 entry = thread + nth * cfg.threads(), expert = static_cast<i32>(id) - c.first_expert();
            if (expert < 0 || expert >= here) return;
            const i32 row = min(atomicAdd(&next[expert], 1), c.a.max_rows - 1);  // as in row_inside
            descriptors[row] = RowDescriptor::of(from.published.rows + entry / cfg.topk * from.published.pitch, -1,
                                                 from.published.result_rows + entry * product_bytes, source);
        });
    return !__syncthreads_or(!in_time);
}

// Called by all threads of a block. Signals every rank that takes part.
template <class Call>
MOECOMM_FN void signal_all(const Call& c) {
    for (i32 step = threadIdx.x; step < Call::cfg.ranks; step += Call::cfg.threads()) {
        const i32 peer = rotated<Call::cfg.ranks>(c.me(), step);
        const bool masked = is_in(c.shared.masked, peer);
        const u64 place = arrived_at(c.window(), c.shape(), masked ? peer : c.me(), 0);
        c.transport.signal(masked ? c.me() : peer, place, chunk_signal(c.round.tag, 0, 0));
    }
}
// Called by all threads of one block. Signals every rank that this rank's rows can be fetched, after earlier kernels of the stream have
// written them; the fence makes them visible to peers.
template <class Call>
MOECOMM_FN void signal_published(const Call& c) {
    await_earlier_kernels();
    fence_system();
    signal_all(c);
}
// Called by all threads of all blocks. Signals every rank once all blocks have stored their row descriptors and earlier kernels have
// written this rank's rows; the fences and last_block order these stores before the signal.
template <class Call>
MOECOMM_FN void signal_descriptors(const Call& c) {
    await_earlier_kernels();
    fence_system();
    if (last_block(&own_state(c.a.ctx)->finished)) signal_all(c);
}

// Called by all threads of one block. Waits for the signals of all ranks (acquire). A thread whose signal did not arrive returns; the
// failure record is filled.
template <class Call>
MOECOMM_FN void await_descriptors(const Call& c) {
    for (i32 source = threadIdx.x; source < Call::cfg.ranks; source += Call::cfg.threads()) {
        u64 seen;
        const u64 flag = arrived_at(c.window(), c.shape(), source, 0);
        if (!wait_flag(c.round, Phase::payload, source, flag, seen, Counter::wait_dispatch, [] { return true; })) return;
    }
}

}  // namespace moecomm
