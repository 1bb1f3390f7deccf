// Step 5 where rows are fetched later (csrc/fused/fetch.cuh): a slip for every entry, straight to its row at the owner, and one flag a
// rank.
#pragma once
#include "../protocol/slip.h"
#include "call.cuh"

namespace moecomm {

// In the place of a Sender: nothing is loaded ahead.
template <class Call>
struct Slips {
    const Call& c;

    MOECOMM_FN explicit Slips(const Call& call) : c(call) {}
    MOECOMM_FN void load_next() const {}
    MOECOMM_FN void drop_loads() const {}
};

// By all threads, of the block's tokens.  Of an expert they take rows as they come: what is made of a row does not depend on which it is.
template <class Call>
MOECOMM_FN void store_slips(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    static_assert(cfg.row_bytes == sizeof(Slip) && cfg.layout == Layout::expert && !cfg.quantize && !cfg.repeat, "rows of experts");
    const u64 home = static_cast<u64>(c.me()) << Slip::kHomeShift, product_bytes = cfg.hidden * bytes_of(cfg.type);
    auto* owners = reinterpret_cast<i32*>(c.a.route.token_owner);
#pragma unroll 2
    for (i32 entry = c.share.first * cfg.topk + threadIdx.x; entry < c.share.end * cfg.topk; entry += cfg.threads()) {
        const i64 id = c.id_at(entry);
        const bool wanted = id >= 0 && valid_id(id, cfg.experts);
        const i32 owner = wanted ? static_cast<i32>(id) / cfg.experts_here() : -1;
        owners[entry] = owner;
        if (!wanted) continue;
        const i32 row = atomicAdd(&c.shared.base[id], 1);
        const Slip slip{c.a.x + entry / cfg.topk * c.a.x_stride, c.a.landing + entry * product_bytes | home};
        *(c.transport.template peer_ptr<Slip>(owner, c.shared.notices[owner].x) + row) = slip;
    }
}

// By all threads of all blocks: once everybody has stored here, and our rows are where they are fetched from, every rank hears of it.
template <class Call>
MOECOMM_FN void tell_slips(const Call& c) {
    await_earlier_kernels();
    fence_system();
    if (!last_block(&own_state(c.a.ctx)->finished)) return;
    for (i32 turn = threadIdx.x; turn < Call::cfg.ranks; turn += Call::cfg.threads()) {
        const i32 peer = rotated<Call::cfg.ranks>(c.me(), turn);
        c.transport.signal(peer, arrived_at(c.window(), c.shape(), c.me(), 0), chunk_signal(c.round.tag, 0, 0));
    }
}

// By one block: those of all ranks are here.
template <class Call>
MOECOMM_FN void await_slips(const Call& c) {
    for (i32 source = threadIdx.x; source < Call::cfg.ranks; source += Call::cfg.threads()) {
        u64 seen;
        if (!wait_flag(c.round, Phase::payload, source, arrived_at(c.window(), c.shape(), source, 0), c.round.tag, seen)) return;
    }
}

}  // namespace moecomm
