// State that all steps of a dispatch share: arguments, transport, the round, and the block's shared memory.
#pragma once
#include "../device/bulk.cuh"
#include "../device/format_casts.cuh"
#include "../device/lanes.cuh"
#include "../device/launch.cuh"
#include "../device/step_counters.cuh"
#include "../device/tagged_words.cuh"
#include "../protocol/placement.h"
#include "../transport/scaleout.cuh"

namespace moecomm {

// Shared memory of one receive warp: pieces of rows that it replicates, and the rows of a chunk's tokens.
template <DispatchConfig cfg>
struct ReplicateRing {
    alignas(128) u8 data[cfg.replicate_slots][cfg.replicate_bytes];
    u64 full[cfg.replicate_slots];
    i32 rows[cfg.replicates() ? kMaxChunk * cfg.topk : 1];
};

// Shared memory of one forward warp: pieces of rows on their way from the receive buffer. Stored behind DispatchShared (several domains).
template <DispatchConfig cfg>
struct ForwardRing {
    static constexpr i32 kSlots = cfg.forward_slots > 0 ? cfg.forward_slots : 1;
    alignas(128) u8 data[kSlots][cfg.forward_bytes > 0 ? cfg.forward_bytes : 16];
    u64 full[kSlots];
};

// Blocks divide the chunks evenly, in order. Returns the first chunk of `block`.
MOECOMM_FN i32 first_chunk_of(u32 block, u32 blocks, u32 chunks) { return static_cast<i32>(chunks * block / blocks); }

// The order in which a source rank's chunks come: the first chunk of each of its blocks, then the second, and so on.
struct Turns {
    i32 chunks, blocks;

    MOECOMM_FN i32 count() const { return ceil_div(chunks, blocks) * blocks; }
    // Returns the chunk whose turn it is; -1: the block has no further chunk.
    MOECOMM_FN i32 chunk_at(i32 turn) const {
        const i32 block = turn % blocks, chunk = first_chunk_of(block, blocks, chunks) + turn / blocks;
        return chunk < first_chunk_of(block + 1, blocks, chunks) ? chunk : -1;
    }
};

// Tokens of a source rank, and the blocks whose chunks arrive in turn (see RoundHeader::blocks).
struct Source {
    i32 num_tokens, chunk_tokens, blocks;
    bool packets;  // its rows arrive in packets, not in chunks
    MOECOMM_FN i32 chunks() const { return packets ? 0 : count_chunks(num_tokens, chunk_tokens); }
    MOECOMM_FN Turns turns() const { return {chunks(), blocks}; }
};

// Shared memory of one send warp, where rows travel in packets: loaded pieces of rows, and the contents of packets.
template <DispatchConfig cfg>
struct PacketRing {
    alignas(128) u8 raw[cfg.ring_slots][cfg.packets && cfg.quantize ? cfg.packet_columns() * bytes_of(cfg.type) : 16];
    alignas(128) u64 content[cfg.ring_slots][cfg.packets ? align_up(cfg.packet_lines * kLineWords, 2) : 2];
    u64 full[cfg.ring_slots];
};

constexpr i32 kCasts = 2;  // buffers of a warp for cast rows whose stores are in flight

// A copy of the table of a Buffer with a placement, unless the slots have been chosen.
template <DispatchConfig cfg, bool looks_up = cfg.placed && !cfg.balanced>
struct PlacementShared {};
template <DispatchConfig cfg>
struct PlacementShared<cfg, true> {
    static constexpr i32 kWords = sizeof(Placement) / sizeof(u32) + placement_words(cfg.named_experts, cfg.experts);
    alignas(Placement) u32 placement[kWords];
};

template <DispatchConfig cfg>
struct DispatchShared : PlacementShared<cfg> {
    static constexpr bool kMovesRows = cfg.send_warps > 0 && !cfg.packets && !cfg.descriptors;
    static constexpr i32 kSendWarps = kMovesRows ? cfg.send_warps : 1, kSlots = cfg.ring_slots;

    // Pieces of rows in flight. The slots to which nothing is loaded at first hold the counters of the warps that count; where rows are
    // cast, the second cast buffers do.
    alignas(128) u8 ring[kSlots][kSendWarps][kMovesRows ? cfg.piece_bytes() : 16];
    PacketRing<cfg> packets[cfg.packets ? cfg.send_warps : 1];
    alignas(128) u8 cast[kSendWarps][kCasts][cfg.quantize && kMovesRows ? cfg.row_bytes : 16];
    alignas(128) u8 counters[cfg.count_bytes > 0 ? cfg.count_bytes : 1];
    ReplicateRing<cfg> replicate[cfg.replicates() ? cfg.receive_warps : 1];
    u64 full[kSlots][kSendWarps];
    i64 needed[cfg.ranks];  // rows at each rank; batched: the first count that is too large, else 0
    DispatchArgs args;
    RoundHeader mine;
    RoundHeader headers[cfg.ranks];
    Source sources[cfg.ranks];
    i32 before[cfg.columns()];        // by column: counts of this rank's tokens before this block's
    i32 own_counts[cfg.columns()];    // counts of all tokens of this rank
    i32 base[cfg.columns()];          // row at the owner of this block's first entry; in the columns of ranks, the flat row
    i32 total[cfg.columns()];         // counts of all ranks
    i32 filled[cfg.ranges().most()];  // end of the rows of each expert here, padding not included
    u32 bad;                          // the first bad entry of this rank's input (see count.cuh), 0 if none
    i32 first_error;                  // the first failed check (see validate_rank), 2 * ranks if the round is valid
    // Packets and row descriptors: by source and local expert, the rows of earlier sources.
    i32 into[cfg.packet_lines > 0 || cfg.descriptors ? cfg.ranks * cfg.ranges().most() : 1];
    i32 slots_before[cfg.ranks + 1];                        // packets: flat rows of earlier sources
    u32 arriving[cfg.ranks][kWantedWords];                  // packets: by source, one bit for each of its tokens that arrives here
    u32 wanted[cfg.ranks][kWantedWords];                    // packets: by rank, one bit for each token of this rank that goes there
    bool agreed;                                            // what the team found, for the other warps
    Forwarders<cfg.ranks, cfg.scaleup_ranks()> forwarders;  // several domains
    Begin begin;
    u64 masked;                                                 // the ranks that take no part: see Mask
    StepCounters<kSendWarps + cfg.metadata_warps> chunk_steps;  // chunks of this block; not signals_early(): one step for all
    alignas(16) u32 scales[kSendWarps][kCasts][align_up(cfg.quantize ? cfg.scale_words() : 1, 4)];
};

// The tokens [first, end) of this block, which are the chunks [first_chunk, end_chunk).
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
    // Every block counts all tokens by itself. Tokens are then few, so one warp is enough for the block's share.
    bool counts_all;
    // Number of blocks that send, from block 0 on. With packets, a third of the blocks sends and the rest unpacks: on a multiprocessor that
    // sends, full links delay loads as well as stores.
    i32 senders;

    // The team: the threads of a block that announce and agree. These are all threads; with packets, all but the send warps, which full
    // links delay, and with several domains, all but the put warps, which come last and may still put.
    static constexpr i32 kTeamFirst = cfg.packets ? cfg.send_warps * kWarp : 0, kTeam = cfg.threads() - kTeamFirst - cfg.put_warps * kWarp;
    static constexpr i32 kTeamWarps = kTeam / kWarp;
    MOECOMM_FN static i32 team_thread() { return threadIdx.x - kTeamFirst; }
    MOECOMM_FN static i32 team_warp() { return warp_id() - kTeamFirst / kWarp; }
    MOECOMM_FN static bool in_team() { return kTeam == cfg.threads() || (team_thread() >= 0 && team_thread() < kTeam); }
    MOECOMM_FN static bool team_any(bool here) { return kTeam < cfg.threads() ? barrier_sync_any(1, kTeam, here) : __syncthreads_or(here); }

    MOECOMM_FN i32 first_unpacker() const { return senders < static_cast<i32>(gridDim.x) ? senders : 0; }
    MOECOMM_FN i32 unpackers() const { return gridDim.x - first_unpacker(); }
    // Index of this block among the unpackers; negative if it only sends.
    MOECOMM_FN i32 nth_unpacker() const { return static_cast<i32>(blockIdx.x) - first_unpacker(); }

    MOECOMM_FN i32 me() const { return a.ctx.rank; }
    MOECOMM_FN auto domains() const { return Domains<cfg.ranks, cfg.scaleup_ranks()>{me()}; }
    // The transport for other domains; a put warp puts through put_channel.
    MOECOMM_FN Transport credit_channel() const { return Transport{a.ctx, channel_of_credits(transport)}; }
    MOECOMM_FN Transport put_channel(i32 warp) const {
        Transport own{a.ctx, channel_of_rows(transport)};
        own.pass_through(put_rings()[warp]);
        return own;
    }
    MOECOMM_FN i32 posters() const { return blocks_of_channel(transport) * max(2 * cfg.put_warps, cfg.forward_warps); }
    // True if rows of this rank (direct_from: of a source rank in another domain) go to owners in other domains without a forwarder.
    MOECOMM_FN bool direct() const { return cfg.part == Part::whole && goes_direct(shape(), a.num_tokens); }
    // True if these rows leave before the ranks agree (scaleout_early.cuh), else false and direct_late() is true.
    static constexpr bool kCanLeaveEarly = cfg.domains() > 1 && cfg.domains() - 1 <= cfg.scaleup_ranks();
    MOECOMM_FN bool leaves_early() const { return kCanLeaveEarly && direct(); }
    MOECOMM_FN bool direct_late() const { return !kCanLeaveEarly && direct(); }
    MOECOMM_FN bool direct_from(i32 source) const {
        return cfg.part == Part::whole && goes_direct(shape(), shared.sources[source].num_tokens);
    }
    MOECOMM_FN auto* forward_rings() const {
        return reinterpret_cast<ForwardRing<cfg>*>(reinterpret_cast<u8*>(&shared) + align_up<i32>(sizeof(shared), 128));
    }
    MOECOMM_FN auto* put_rings() const { return reinterpret_cast<typename T::Ring*>(forward_rings() + cfg.forward_warps); }
    // Several domains: the turns in which chunks of a source take the places of its ring, here and at the source. Blocks send at the same
    // time; in the order of tokens most of them would wait for the first blocks. If each chunk has a place of its own, tokens are in order.
    MOECOMM_FN Turns turns_of(const Source& from) const { return turns_of(from.chunks(), from.chunk_tokens, from.blocks); }
    MOECOMM_FN Turns turns_of(i32 chunks, i32 chunk_tokens, i32 blocks) const {
        return {chunks, chunks <= ring_chunks(shape(), chunk_tokens) ? 1 : blocks};
    }
    // The turn of a chunk of this block, and the place of one of its tokens among those of a ring.
    MOECOMM_FN i32 turn_of(i32 chunk) const {
        const i32 blocks = turns_of(count_chunks(a.num_tokens, a.chunk_tokens), a.chunk_tokens, senders).blocks;
        return blocks == 1 ? chunk : static_cast<i32>(blockIdx.x) + blocks * (chunk - share.first_chunk);
    }
    MOECOMM_FN i32 place_of(i32 token) const {
        const i32 chunk = token >> (__ffs(a.chunk_tokens) - 1);
        return token + (turn_of(chunk) - chunk) * a.chunk_tokens;
    }
    MOECOMM_FN const WindowLayout& window() const { return a.ctx.window; }
    MOECOMM_FN const Shape& shape() const {
        if constexpr (cfg.domains() > 1) return shared.forwarders.shape;
        return a.ctx.shape;
    }
    MOECOMM_FN i32 chunk_end(i32 chunk) const { return min((chunk + 1) * a.chunk_tokens, a.num_tokens); }

    // Counters by column of a warp that counts: first its own entries, then those of earlier warps, then the next row.
    MOECOMM_FN i32* counters(i32 warp) const {
        if (cfg.count_bytes > 0) return reinterpret_cast<i32*>(shared.counters) + warp * cfg.columns();
        if (cfg.quantize) return reinterpret_cast<i32*>(shared.cast[warp][kCasts - 1]);
        return reinterpret_cast<i32*>(shared.ring[cfg.slots_ahead()][0]) + warp * cfg.columns();
    }
    MOECOMM_FN i32 count_warps() const { return counts_all ? 1 : cfg.count_warps; }
    MOECOMM_FN i32 counted_from(i32 warp) const {  // first token of such a warp
        return min((share.first_chunk + (share.end_chunk - share.first_chunk) * warp / count_warps()) * a.chunk_tokens, share.end);
    }
    // Number of steps of shared.chunk_steps, and the step to which the block's n-th chunk belongs.
    MOECOMM_FN i32 steps() const {
        const i32 chunks = share.end_chunk - share.first_chunk;
        return cfg.signals_early() ? chunks : min(chunks, 1);
    }
    MOECOMM_FN static i32 step_of_chunk(i32 nth) { return cfg.signals_early() ? nth : 0; }
    MOECOMM_FN u32* range(i32 rank, i32 chunk) const { return transport.template local<u32>(range_at(window(), shape(), rank, chunk)); }

    MOECOMM_FN i64 id_at(i64 entry) const {
        if constexpr (cfg.descriptors) {  // bypasses L1: this kernel has not waited for earlier kernels
            if constexpr (cfg.idx_bytes == 8) return static_cast<i64>(load_relaxed(reinterpret_cast<const u64*>(a.topk_idx) + entry));
            return static_cast<i32>(load_relaxed(reinterpret_cast<const u32*>(a.topk_idx) + entry));
        }
        if constexpr (cfg.idx_bytes == 8) return reinterpret_cast<const i64*>(a.topk_idx)[entry];
        return reinterpret_cast<const i32*>(a.topk_idx)[entry];
    }
    MOECOMM_FN const Placement& placement() const {
        if constexpr (cfg.balanced)
            return *own<const Placement>(a.ctx, placement_at(window()));
        else
            return *reinterpret_cast<const Placement*>(shared.placement);
    }
    // The expert of an entry, in a Buffer with a placement its slot; cfg.experts for an invalid id.
    MOECOMM_FN i64 expert_at(i64 entry) const {
        if constexpr (cfg.balanced)
            return own<const i32>(a.ctx, chosen_at(window()))[entry];
        else if constexpr (cfg.placed)
            return slot_of(placement(), id_at(entry), entry, cfg.topk, cfg.experts, a.route.first_token);
        return id_at(entry);
    }
    // Experts that callers name.
    MOECOMM_FN i32 named_experts() const {
        if constexpr (cfg.placed) return moecomm::named_experts(shape());
        return cfg.experts;
    }
    // Experts of this rank.
    MOECOMM_FN i32 first_expert() const { return cfg.ranges().first(me()); }
    MOECOMM_FN i32 experts_here() const { return cfg.ranges().count(me()); }
    // Index of an entry's expert at its owner. In range even if the id has changed since it was checked.
    MOECOMM_FN i32 local_at(i64 entry, i32 owner) const {
        const u32 id = static_cast<u32>(expert_at(entry));
        if constexpr (cfg.ranges().longer() == 0) return static_cast<i32>(id % cfg.ranges().least());
        return min(static_cast<i32>(id - cfg.ranges().first(owner)) & 0x7fffffff, cfg.ranges().count(owner) - 1);
    }
    MOECOMM_FN GlobalScale global_scale() const {
        if constexpr (cfg.quantize && (cfg.format == Format::nvfp4 || cfg.format == Format::fp8_tensor))
            return GlobalScale(a.in_scales != 0 ? *reinterpret_cast<const float*>(a.in_scales)
                                                : __int_as_float(static_cast<i32>(a.in_scales_stride)));
        return {};
    }
    MOECOMM_FN float weight_at(i64 entry) const {
        return a.topk_weights != 0 ? reinterpret_cast<const float*>(a.topk_weights)[entry] : 1.0f;
    }
};

MOECOMM_FN Share share_of_block(i32 num_tokens, i32 chunk_tokens, i32 blocks) {
    const i32 chunks = count_chunks(num_tokens, chunk_tokens), block = blockIdx.x;
    const i32 first = first_chunk_of(min(block, blocks), blocks, chunks), end = first_chunk_of(min(block + 1, blocks), blocks, chunks);
    return {first, end, min(first * chunk_tokens, num_tokens), min(end * chunk_tokens, num_tokens)};
}

// Called by all lanes of a warp. Returns the lanes with the same rank as the calling lane, 0 for rank -1. Up to 8 ranks take one ballot
// each, because independent ballots overlap.
template <i32 ranks>
MOECOMM_FN u32 lanes_of_rank(i32 rank) {
    if constexpr (ranks > 8) {
        const u32 same = __match_any_sync(kAllLanes, rank);
        return rank >= 0 ? same : 0;
    } else {
        u32 same_rank = 0;
#pragma unroll
        for (i32 r = 0; r < ranks; ++r) {
            const u32 same = __ballot_sync(kAllLanes, rank == r);
            if (rank == r) same_rank = same;
        }
        return same_rank;
    }
}
// Returns the lanes of the calling lane's token, where a warp holds the entries of several tokens.
template <i32 topk>
MOECOMM_FN u32 lanes_of_token() {
    return (topk == kWarp ? kAllLanes : (1u << topk % kWarp) - 1) << lane_id() / topk * topk;
}

// Called by all lanes of a warp. Calls body(first token of the step, token, k, id) for the entries of the tokens [first, end): one entry in
// each lane, `per_step` complete tokens in a step, token -1 in idle lanes. All lanes run the body together. With `stride` warps, each gets
// every stride-th part, from `part` on.
template <class Call, class Body>
MOECOMM_FN void for_entries(const Call& c, i32 first, i32 end, i32 part, i32 stride, i32 per_step, Body body) {
    constexpr i32 kStepsAhead = Call::cfg.packets ? 2 : 8;  // steps whose ids are loaded together
    const i32 nth = lane_id() / Call::cfg.topk, k = lane_id() % Call::cfg.topk;
    for (i32 ahead = first + part * kStepsAhead * per_step; ahead < end; ahead += stride * kStepsAhead * per_step) {
        i64 ids[kStepsAhead];
#pragma unroll
        for (i32 i = 0; i < kStepsAhead; ++i) {
            const i32 token = ahead + i * per_step + nth;
            ids[i] = nth < per_step && token < end ? c.expert_at(static_cast<i64>(token) * Call::cfg.topk + k) : -1;
        }
        for (i32 i = 0; i < kStepsAhead; ++i) {
            const i32 at = ahead + i * per_step, token = at + nth;
            if (at >= end) break;
            body(at, nth < per_step && token < end ? token : -1, k, ids[0]);
#pragma unroll
            for (i32 j = 1; j < kStepsAhead; ++j) ids[j - 1] = ids[j];  // one copy of the body, because instruction fetches cost time
        }
    }
}

}  // namespace moecomm
