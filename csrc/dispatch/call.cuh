// What the parts of one dispatch share: arguments, transport, the round, and the block's shared memory.
#pragma once
#include "../device/bulk.cuh"
#include "../device/cast.cuh"
#include "../device/copy.cuh"
#include "../device/launch.cuh"
#include "../device/step_counters.cuh"
#include "../device/tagged_words.cuh"
#include "../transport/scaleout.cuh"

namespace moecomm {

// A receive warp's own: pieces of rows that are copied, and the rows of the tokens of a chunk.
template <DispatchConfig cfg>
struct ReplicateRing {
    alignas(128) u8 data[cfg.replicate_slots][cfg.replicate_bytes];
    u64 full[cfg.replicate_slots];
    i32 rows[cfg.replicates() ? kMaxChunk * cfg.topk : 1];
};

// A relay warp's own: pieces of rows on their way from where they have landed.  Behind DispatchShared, where there are several domains.
template <DispatchConfig cfg>
struct ForwardRing {
    static constexpr i32 kSlots = cfg.forward_slots > 0 ? cfg.forward_slots : 1;
    alignas(128) u8 data[kSlots][cfg.forward_bytes > 0 ? cfg.forward_bytes : 16];
    u64 full[kSlots];
};

// Who sends what, and in which order it comes: see RoundHeader::blocks.
struct Source {
    i32 num_tokens, chunk_tokens, blocks;
    bool packets;  // its rows come in packets, not in chunks
    MOECOMM_FN i32 chunks() const { return packets ? 0 : count_chunks(num_tokens, chunk_tokens); }
};

// A send warp's own, where rows go in packets: pieces of rows as they are loaded, and what goes into a packet.
template <DispatchConfig cfg>
struct PacketRing {
    alignas(128) u8 raw[cfg.ring_slots][cfg.packets && cfg.quantize ? cfg.packet_bytes * bytes_of(cfg.type) : 16];
    alignas(128) u64 content[cfg.ring_slots][cfg.packets ? align_up(cfg.packet_lines * kLineWords, 2) : 2];
    u64 full[cfg.ring_slots];
};

constexpr i32 kCasts = 2;  // rows of a warp that have been cast and are under way

template <DispatchConfig cfg>
struct DispatchShared {
    static constexpr bool kMovesRows = cfg.send_warps > 0 && !cfg.packets && !cfg.descriptors;
    static constexpr i32 kSendWarps = kMovesRows ? cfg.send_warps : 1, kSlots = cfg.ring_slots;

    // Pieces of rows on their way.  The places that nothing is under way to at first hold the counters of the warps that count; where rows
    // are cast, those of the second casts do.
    alignas(128) u8 ring[kSlots][kSendWarps][kMovesRows ? cfg.piece_bytes() : 16];
    PacketRing<cfg> packets[cfg.packets ? cfg.send_warps : 1];
    alignas(128) u8 cast[kSendWarps][kCasts][cfg.quantize && kMovesRows ? cfg.hidden : 16];
    alignas(128) u8 counters[cfg.count_bytes > 0 ? cfg.count_bytes : 1];
    ReplicateRing<cfg> replicate[cfg.replicates() ? cfg.receive_warps : 1];
    u64 full[kSlots][kSendWarps];
    i64 needed[cfg.ranks];  // rows at each rank; batched: the first count that is too large, else 0
    DispatchArgs args;
    RoundHeader mine;
    RoundHeader headers[cfg.ranks];
    Source sources[cfg.ranks];
    i32 before[cfg.columns()];       // by column, ours: of the tokens before this block's
    i32 ours[cfg.columns()];         // of all our tokens
    i32 base[cfg.columns()];         // row, at its owner, of the first entry of this block; in the columns of ranks the flat row
    i32 total[cfg.columns()];        // of all ranks
    i32 filled[cfg.experts_here()];  // end of the rows of each expert here, padding not included
    u32 bad;                         // the first bad entry of our input, 0 if none
    i32 first_error;                 // the first rank that makes the round void: by its notice, or + ranks by its rows; else 2 * ranks
    // Where rows come in packets, or slips do: by source and expert here, the rows of the sources before.  Packets: the same of flat rows,
    // and, a bit a token, what comes from a source, and what of ours is for a rank.
    i32 into[cfg.packet_lines > 0 || cfg.descriptors ? cfg.experts : 1];
    i32 slots_before[cfg.ranks + 1];
    u32 coming[cfg.ranks][kWantedWords];
    u32 wanted[cfg.ranks][kWantedWords];
    bool agreed;  // all mail has come
    Begin begin;
    StepCounters<kSendWarps + cfg.metadata_warps> sent;  // chunks of this block, or all of them
    alignas(16) u32 scales[kSendWarps][kCasts][align_up(cfg.quantize ? ceil_div(cfg.hidden, kQuantGroup) : 1, 4)];
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
    // Where rows go in packets, the first third of the blocks sends.  The others unpack: full links hold up loads as well as stores of a
    // multiprocessor that sends.
    i32 senders;

    // Who announces and agrees: all threads; where rows go in packets those that do not send, because links that are full hold up who does.
    static constexpr i32 kTeamFirst = cfg.packets ? cfg.send_warps * kWarp : 0, kTeam = cfg.threads() - kTeamFirst;
    static constexpr i32 kTeamWarps = kTeam / kWarp;
    MOECOMM_FN static i32 team_thread() { return threadIdx.x - kTeamFirst; }
    MOECOMM_FN static i32 team_warp() { return warp_id() - kTeamFirst / kWarp; }
    MOECOMM_FN static bool team_any(bool here) { return cfg.packets ? barrier_sync_any(1, kTeam, here) : __syncthreads_or(here); }

    MOECOMM_FN i32 first_unpacker() const { return senders < static_cast<i32>(gridDim.x) ? senders : 0; }
    MOECOMM_FN i32 unpackers() const { return gridDim.x - first_unpacker(); }
    // Counted from the first; negative: it only sends.
    MOECOMM_FN i32 nth_unpacker() const { return static_cast<i32>(blockIdx.x) - first_unpacker(); }

    MOECOMM_FN i32 me() const { return a.ctx.rank; }
    MOECOMM_FN auto domains() const { return Domains<cfg.ranks, cfg.scaleup_ranks()>{me()}; }
    // How what crosses to other domains goes: each block has a channel, as far as there are channels.
    MOECOMM_FN Transport channel() const { return Transport{a.ctx, static_cast<i32>(blockIdx.x) % transport.channels()}; }
    MOECOMM_FN i32 posters() const {
        return ceil_div(static_cast<i32>(gridDim.x), transport.channels()) * (cfg.put_warps + cfg.forward_warps);
    }
    // Whether our rows, or those of a source of another domain, go straight to their owners.
    MOECOMM_FN bool direct() const { return cfg.part == Part::whole && goes_direct(shape(), a.num_tokens); }
    MOECOMM_FN bool direct_from(i32 source) const {
        return cfg.part == Part::whole && goes_direct(shape(), shared.sources[source].num_tokens);
    }
    MOECOMM_FN auto* forward_rings() const {
        return reinterpret_cast<ForwardRing<cfg>*>(reinterpret_cast<u8*>(&shared) + align_up<i32>(sizeof(shared), 128));
    }
    MOECOMM_FN const WindowLayout& window() const { return a.ctx.window; }
    MOECOMM_FN const Shape& shape() const { return a.ctx.shape; }
    MOECOMM_FN i32 chunk_end(i32 chunk) const { return min((chunk + 1) * a.chunk_tokens, a.num_tokens); }

    // By column, of one of the warps that count: at first its entries, then those of the warps before it, then the next row.
    MOECOMM_FN i32* counters(i32 warp) const {
        if (cfg.count_bytes > 0) return reinterpret_cast<i32*>(shared.counters) + warp * cfg.columns();
        if (cfg.quantize) return reinterpret_cast<i32*>(shared.cast[warp][kCasts - 1]);
        return reinterpret_cast<i32*>(shared.ring[cfg.slots_ahead()][0]) + warp * cfg.columns();
    }
    // The chunks of such a warp.
    MOECOMM_FN i32 count_warps() const { return alone ? 1 : cfg.count_warps; }
    MOECOMM_FN i32 counted_from(i32 warp) const {  // the first token
        return min((share.first_chunk + (share.end_chunk - share.first_chunk) * warp / count_warps()) * a.chunk_tokens, share.end);
    }
    // Of shared.sent: how many, and that of the n-th chunk of the block.
    MOECOMM_FN i32 turns() const {
        const i32 chunks = share.end_chunk - share.first_chunk;
        return cfg.signals_early() ? chunks : min(chunks, 1);
    }
    MOECOMM_FN static i32 rotation_step_of(i32 n) { return cfg.signals_early() ? n : 0; }
    MOECOMM_FN u32* range(i32 rank, i32 chunk) const { return transport.template local<u32>(range_at(window(), shape(), rank, chunk)); }

    MOECOMM_FN i64 id_at(i64 entry) const {
        if constexpr (cfg.descriptors) {  // not through the first-level cache: nothing has been waited for since the launch
            if constexpr (cfg.idx_bytes == 8) return static_cast<i64>(load_relaxed(reinterpret_cast<const u64*>(a.topk_idx) + entry));
            return static_cast<i32>(load_relaxed(reinterpret_cast<const u32*>(a.topk_idx) + entry));
        }
        if constexpr (cfg.idx_bytes == 8) return reinterpret_cast<const i64*>(a.topk_idx)[entry];
        return reinterpret_cast<const i32*>(a.topk_idx)[entry];
    }
    // Of an entry with an owner: its expert's number there, whatever the id is by now.
    MOECOMM_FN i32 local_at(i64 entry) const { return static_cast<i32>(static_cast<u32>(id_at(entry)) % cfg.experts_here()); }
    MOECOMM_FN float weight_at(i64 entry) const {
        return a.topk_weights != 0 ? reinterpret_cast<const float*>(a.topk_weights)[entry] : 1.0f;
    }
};

// Blocks share the chunks out evenly, neighbours together: the first of `block`.
MOECOMM_FN i32 first_chunk_of(u32 block, u32 blocks, u32 chunks) { return static_cast<i32>(chunks * block / blocks); }
MOECOMM_FN Share share_of_block(i32 num_tokens, i32 chunk_tokens, i32 blocks) {
    const i32 chunks = count_chunks(num_tokens, chunk_tokens), block = blockIdx.x;
    const i32 first = first_chunk_of(min(block, blocks), blocks, chunks), end = first_chunk_of(min(block + 1, blocks), blocks, chunks);
    return {first, end, min(first * chunk_tokens, num_tokens), min(end * chunk_tokens, num_tokens)};
}

// Lanes with the same rank as ours, none if it is -1.  Few ranks take a ballot each, which do not wait for each other.
template <i32 ranks>
MOECOMM_FN u32 lanes_of_rank(i32 rank) {
    if constexpr (ranks > 8) {
        const u32 same = __match_any_sync(kAllLanes, rank);
        return rank >= 0 ? same : 0;
    } else {
        u32 ours = 0;
#pragma unroll
        for (i32 r = 0; r < ranks; ++r) {
            const u32 same = __ballot_sync(kAllLanes, rank == r);
            if (rank == r) ours = same;
        }
        return ours;
    }
}
// Lanes of our token, where each has an entry of one of several tokens.
template <i32 topk>
MOECOMM_FN u32 lanes_of_token() {
    return (topk == kWarp ? kAllLanes : (1u << topk % kWarp) - 1) << lane_id() / topk * topk;
}

// Calls body(first token, token, k, id) for the entries of the tokens [first, end), a lane each, `per_step` whole tokens at once; token -1
// in idle lanes.  All lanes of the warp run the body together.  A warp may take every `stride`-th part only, from `part` on.
template <class Call, class Body>
MOECOMM_FN void for_entries(const Call& c, i32 first, i32 end, i32 part, i32 stride, i32 per_step, Body body) {
    constexpr i32 kStepsAhead = Call::cfg.packets ? 2 : 8;  // whose ids are loaded together
    const i32 nth = lane_id() / Call::cfg.topk, k = lane_id() % Call::cfg.topk;
    for (i32 ahead = first + part * kStepsAhead * per_step; ahead < end; ahead += stride * kStepsAhead * per_step) {
        i64 ids[kStepsAhead];
#pragma unroll
        for (i32 i = 0; i < kStepsAhead; ++i) {
            const i32 token = ahead + i * per_step + nth;
            ids[i] = nth < per_step && token < end ? c.id_at(static_cast<i64>(token) * Call::cfg.topk + k) : -1;
        }
        for (i32 i = 0; i < kStepsAhead; ++i) {
            const i32 at = ahead + i * per_step, token = at + nth;
            if (at >= end) break;
            body(at, nth < per_step && token < end ? token : -1, k, ids[0]);
#pragma unroll
            for (i32 j = 1; j < kStepsAhead; ++j) ids[j - 1] = ids[j];  // one copy of the body: code that is cold is slow, too
        }
    }
}

}  // namespace moecomm
