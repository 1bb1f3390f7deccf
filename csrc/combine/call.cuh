// What the parts of one combine share: arguments, transport, the round, and the block's shared memory.
#pragma once
#include "../device/bulk.cuh"
#include "../device/cast.cuh"
#include "../device/copy.cuh"
#include "../device/grid.cuh"

namespace moecomm {

// A row that a warp makes out of others.
struct Item {
    i32 sources;  // rows it is made of
    i32 index;    // reduce: flat row; pull: token
    i32 rank;     // reduce: whose block of rows ends with it, -1 if none does
    i32 block;    // that block
};

constexpr i32 kItemsOpen = 8;  // whose sources are loading

// A warp's own: pieces of rows on their way in, and whose they are.
template <i32 slots, i32 bytes>
struct RowRing {
    static constexpr i32 kSlots = slots, kBytes = bytes;
    alignas(128) u8 data[slots][bytes];
    u64 full[slots];
    float weight[slots];
    Item items[kItemsOpen];
};

template <CombineConfig cfg>
struct CombineShared {
    RowRing<cfg.reduce_slots, cfg.reduce_bytes> reduce[cfg.reduce_warps];
    RowRing<cfg.pull_slots, cfg.pull_bytes> pull[cfg.pull_warps];
    Notice mine;
    u32 is_void;
};

template <CombineConfig config, class T>
struct CombineCall {
    static constexpr CombineConfig cfg = config;
    using Transport = T;

    const CombineArgs& a;
    Transport transport;
    Round round;
    CombineShared<config>& shared;

    MOECOMM_FN i32 me() const { return a.ctx.rank; }
    MOECOMM_FN const WindowLayout& window() const { return a.ctx.window; }
    MOECOMM_FN i64 pitch() const { return a.ctx.shape.staged_row_bytes; }
    MOECOMM_FN i64 grads_at() const { return pitch() - cfg.grads_bytes(); }  // in a staged row
    MOECOMM_FN u8* staged_row(i32 slot) const { return transport.template local<u8>(window().staging) + slot * pitch(); }
    MOECOMM_FN i32 source_base(i32 rank) const { return reinterpret_cast<const i32*>(a.route.source_base)[rank]; }
    MOECOMM_FN i32 blocks_of(i32 rank) const { return ceil_div(source_base(rank + 1) - source_base(rank), kMinChunk); }

    // Staged rows are for all ranks: the blocks of a rank's rows, the first of each before the second of any, as in dispatch.
    MOECOMM_FN i32 staged_items() const {
        i32 most = 0;
        for (i32 s = 0; s < cfg.ranks; ++s) most = max(most, blocks_of(s));
        return most * cfg.ranks;
    }
};

// A block of the rows we stage for one rank.
struct StagedBlock {
    i32 rank, block, first, end;
};
template <class Call>
MOECOMM_FN StagedBlock staged_block(const Call& c, i32 item) {
    constexpr CombineConfig cfg = Call::cfg;
    const i32 rank = rotated<cfg.ranks>(c.me(), item % cfg.ranks), block = item / cfg.ranks;
    const i32 first = c.source_base(rank) + block * kMinChunk;
    return {rank, block, first, min(first + kMinChunk, c.source_base(rank + 1))};
}

// All rows of a block are staged: by a whole warp, whose lanes have written them.
template <class Call>
MOECOMM_FN void tell_reduced(const Call& c, i32 rank, i32 block) {
    fence_async();  // the rank reads them with bulk copies
    fence_system();
    __syncwarp();
    if (lane_id() == 0) c.transport.signal(rank, reduced_at(c.window(), c.me(), block), tag_signal(c.round.tag));
}

}  // namespace moecomm
