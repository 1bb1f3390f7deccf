// What the parts of one combine share: arguments, transport, the round, and the block's shared memory.
#pragma once
#include "../device/bulk.cuh"
#include "../device/cast.cuh"
#include "../device/copy.cuh"
#include "../device/grid.cuh"
#include "../device/turn.cuh"

namespace moecomm {

// A row that a warp makes out of others.
struct Item {
    i32 sources;  // rows it is made of
    i32 index;    // reduce: flat row, -1 if this warp has none in the block; pull: token
    i32 turn;     // reduce: whose block it is
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
    Turns<cfg.reduce_warps> staged;  // blocks of rows
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

    // Staged rows are for all ranks, in blocks of kMinChunk rows of one rank: the first of each rank before the second of any.
    MOECOMM_FN i32 staged_blocks() const {
        i32 most = 0;
        for (i32 s = 0; s < cfg.ranks; ++s) most = max(most, blocks_of(s));
        return most * cfg.ranks;
    }
};

// The blocks of rows that a block of the grid stages, one after the other, `turn` counting; their rows are strided over its reduce warps.
struct StagedBlock {
    i32 rank, number, first, end;  // whose rows; which of that rank; flat rows, none if there is no such block
};
template <class Call>
MOECOMM_FN StagedBlock staged_block(const Call& c, i32 turn) {
    constexpr CombineConfig cfg = Call::cfg;
    const i32 nth = blockIdx.x + gridDim.x * turn, rank = rotated<cfg.ranks>(c.me(), nth % cfg.ranks), number = nth / cfg.ranks;
    const i32 first = c.source_base(rank) + number * kMinChunk;
    return {rank, number, first, min(first + kMinChunk, c.source_base(rank + 1))};
}
template <class Call>
MOECOMM_FN i32 staged_turns(const Call& c) {
    const i32 blocks = c.staged_blocks();
    return blocks > static_cast<i32>(blockIdx.x) ? ceil_div(blocks - static_cast<i32>(blockIdx.x), static_cast<i32>(gridDim.x)) : 0;
}

// A reduce warp has staged its rows of a block; the last of them tells the rank.
template <class Call>
MOECOMM_FN void tell_staged(const Call& c, i32 turn) {
    if (!complete_turn(c.shared.staged, c.round, turn)) return;
    const StagedBlock block = staged_block(c, turn);
    if (lane_id() == 0 && block.first < block.end)
        c.transport.signal(block.rank, reduced_at(c.window(), c.me(), block.number), tag_signal(c.round.tag));
}

}  // namespace moecomm
