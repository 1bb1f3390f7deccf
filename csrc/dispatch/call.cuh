// What the parts of one dispatch share: arguments, transport, the round, and the block's shared memory.
#pragma once
#include "../device/bulk.cuh"
#include "../device/cast.cuh"
#include "../device/copy.cuh"
#include "../device/launch.cuh"
#include "../device/mail.cuh"
#include "../device/turn.cuh"

namespace moecomm {

// A receive warp's own: pieces of rows that are copied, and the rows of the tokens of a chunk.
template <DispatchConfig cfg>
struct SpreadRing {
    alignas(128) u8 data[cfg.spread_slots][cfg.spread_bytes];
    u64 full[cfg.spread_slots];
    i32 rows[cfg.spreads() ? kMaxChunk * cfg.topk : 1];
};

// Who sends what, and in which order it comes: see Notice::blocks.
struct Source {
    i32 num_tokens, chunk_tokens, blocks;
    MOECOMM_FN i32 chunks() const { return ceil_div(num_tokens, chunk_tokens); }
};

constexpr i32 kCasts = 2;  // items of a warp that have been cast and are under way

template <DispatchConfig cfg>
struct DispatchShared {
    static constexpr i32 kSendWarps = cfg.send_warps > 0 ? cfg.send_warps : 1, kSlots = cfg.ring_slots;

    // Pieces of rows on their way.  The places that nothing is under way to at first hold the counters of the warps that count.
    alignas(128) u8 ring[kSlots][kSendWarps][cfg.send_warps > 0 ? cfg.piece_bytes() : 16];
    alignas(128) u8 cast[kSendWarps][kCasts][cfg.quantize && cfg.send_warps > 0 ? cfg.cast_columns() : 16];
    alignas(128) u8 counters[cfg.count_beside > 0 ? cfg.count_beside : 1];
    SpreadRing<cfg> spread[cfg.spreads() ? cfg.receive_warps : 1];
    u64 full[kSlots][kSendWarps];
    i64 needed[cfg.ranks];  // rows at each rank; batched: the first count that is too large, else 0
    DispatchArgs args;
    Notice mine;
    Notice notices[cfg.ranks];
    Source sources[cfg.ranks];
    i32 before[cfg.columns()];       // by column, ours: of the tokens before this block's
    i32 ours[cfg.columns()];         // of all our tokens
    i32 base[cfg.columns()];         // row, at its owner, of the first entry of this block; in the columns of ranks the flat row
    i32 total[cfg.columns()];        // of all ranks
    i32 filled[cfg.experts_here()];  // end of the rows of each expert here, padding not included
    u32 bad;                         // the first bad entry of our input, 0 if none
    i32 objection;                   // the first rank that makes the round void: by its notice, or + ranks by its rows; else 2 * ranks
    Begin begin;
    Turns<kSendWarps + cfg.describe_warps> sent;  // chunks of this block
    alignas(16) u32 scales[kSendWarps][kCasts][align_up(cfg.quantize ? ceil_div(cfg.cast_columns(), kQuantGroup) : 1, 4)];
};

// The tokens [first, end) of this block: whole chunks, the first of them `first_chunk`.
struct Share {
    i32 first_chunk, end_chunk, first, end;
};

template <DispatchConfig config, class T>
struct DispatchCall {
    static constexpr DispatchConfig cfg = config;
    using Transport = T;

    const DispatchArgs& a;  // in shared memory
    Transport transport;
    Round round;
    DispatchShared<config>& shared;
    Share share;
    // Every block counts all tokens by itself; so one warp is enough for its share.
    bool alone;

    MOECOMM_FN i32 me() const { return a.ctx.rank; }
    MOECOMM_FN const WindowLayout& window() const { return a.ctx.window; }
    MOECOMM_FN const Shape& shape() const { return a.ctx.shape; }
    MOECOMM_FN i32 chunk_end(i32 chunk) const { return min((chunk + 1) * a.chunk_tokens, a.num_tokens); }

    // By column, of one of the warps that count: at first its entries, then those of the warps before it, then the next row.
    MOECOMM_FN i32* counters(i32 warp) const {
        u8* const idle = cfg.quantize ? shared.cast[0][0] : shared.ring[cfg.slots_ahead()][0];
        u8* const first = cfg.count_beside > 0 ? shared.counters : idle;
        return reinterpret_cast<i32*>(first) + warp * cfg.columns();
    }
    // The chunks of such a warp.
    MOECOMM_FN i32 count_warps() const { return alone ? 1 : cfg.count_warps; }
    MOECOMM_FN i32 counted_from(i32 warp) const { return share.first_chunk + (share.end_chunk - share.first_chunk) * warp / count_warps(); }
    MOECOMM_FN u32* range(i32 rank, i32 chunk) const { return transport.template local<u32>(range_at(window(), shape(), rank, chunk)); }

    MOECOMM_FN i64 id_at(i64 entry) const {
        if constexpr (cfg.idx_bytes == 8) return reinterpret_cast<const i64*>(a.topk_idx)[entry];
        return reinterpret_cast<const i32*>(a.topk_idx)[entry];
    }
    MOECOMM_FN float weight_at(i64 entry) const {
        return a.topk_weights != 0 ? reinterpret_cast<const float*>(a.topk_weights)[entry] : 1.0f;
    }
};

// Blocks share the chunks out evenly, neighbours together: the first of `block`.
MOECOMM_FN i32 first_chunk_of(i32 block, i32 blocks, i32 chunks) { return static_cast<i32>(static_cast<i64>(chunks) * block / blocks); }
MOECOMM_FN Share share_of_block(i32 num_tokens, i32 chunk_tokens) {
    const i32 chunks = ceil_div(num_tokens, chunk_tokens), block = blockIdx.x, blocks = gridDim.x;
    const i32 first = first_chunk_of(block, blocks, chunks), end = first_chunk_of(block + 1, blocks, chunks);
    return {first, end, min(first * chunk_tokens, num_tokens), min(end * chunk_tokens, num_tokens)};
}

constexpr i32 kStepsAhead = 4;  // whose ids are loaded together

// Calls body(token, k, id) for the entries of the tokens [first, end), a lane each and whole tokens at once; token -1 in idle lanes.  All
// lanes of the warp run the body together.  A warp may take every `stride`-th part only, from `part` on.
template <class Call, class Body>
MOECOMM_FN void for_entries(const Call& c, i32 first, i32 end, i32 part, i32 stride, Body body) {
    constexpr i32 step = Call::cfg.tokens_per_step();
    const i32 nth = lane_id() / Call::cfg.topk, k = lane_id() % Call::cfg.topk;
    for (i32 at = first + part * kStepsAhead * step; at < end; at += stride * kStepsAhead * step) {
        i64 ids[kStepsAhead];
#pragma unroll
        for (i32 i = 0; i < kStepsAhead; ++i) {
            const i32 token = at + i * step + nth;
            ids[i] = nth < step && token < end ? c.id_at(static_cast<i64>(token) * Call::cfg.topk + k) : -1;
        }
#pragma unroll
        for (i32 i = 0; i < kStepsAhead; ++i) {
            if (at + i * step >= end) break;
            const i32 token = at + i * step + nth;
            body(nth < step && token < end ? token : -1, k, ids[i]);
        }
    }
}

}  // namespace moecomm
