// State that all steps of a combine share: arguments, transport, the round, and the block's shared memory.
#pragma once
#include "../device/bulk.cuh"
#include "../device/cast.cuh"
#include "../device/lanes.cuh"
#include "../device/launch.cuh"
#include "../device/packet.cuh"
#include "../device/quantize.cuh"
#include "../device/step_counters.cuh"
#include "../device/tagged_words.cuh"
#include "../transport/scaleout.cuh"

namespace moecomm {

// A piece of a row, the sum of the same piece of several source rows; with several domains, a row of pieces (gather_rows.cuh).
struct Item {
    i32 sources;      // rows that are added
    i32 column;       // first column of the first piece
    i32 token;        // number at its source rank; -1: nothing to store. Reduce: where it is staged, in steps of 16 bytes of the window
    i32 ring_column;  // return-forward: of this rank's rings. Reduce, verified rounds: the place of its hash
    i32 step;         // return-forward, reduce: the work item of which this is the last item, else -1
    union {
        u32 singles;  // one domain: one bit for each source, in order, that is a row as the expert left it
        struct {
            unsigned short at, end;
        } inner;  // several: the sources that are added to each other first; at 0: none
    };
};

// Destination of a token's sum, and the bias to add (null: none).
struct OutputRow {
    u8* row;
    const u8* bias;
    i32 token;
    MOECOMM_FN explicit operator bool() const { return row != nullptr; }
};

// A range of flat rows on this rank.
struct RowRange {
    i32 first, count;
};

constexpr i32 kItemsOpen = 8;  // items of a warp whose sources are loading

// Result of Role::open in gather.cuh.
enum class Next { item, later, none };  // later: it would block

// Shared memory of one warp: pieces in flight, and the items that they belong to.
template <i32 slots, i32 bytes, bool has_weights = false, bool has_hashes = false, i32 scale_bytes = 0>
struct RowRing {
    static constexpr i32 kSlots = slots, kBytes = bytes;
    alignas(128) u8 data[slots][bytes + scale_bytes];
    alignas(16) float weights[has_weights ? slots : 1][4];  // of single rows, or of all that a reduce warp adds, in the first place
    u64 full[slots];
    u64* hashes[has_hashes ? slots : 1];  // verified rounds: to which the hash of a piece is added
    Item items[kItemsOpen];
};

// Shared memory for several domains, stored behind CombineShared.
template <CombineConfig cfg>
struct ScaleoutShared {
    static constexpr bool kReduces = cfg.reduce_slots > 0, kWeighted = cfg.weighted && cfg.layout != Layout::flat;
    using ReduceRowRing = RowRing<kReduces ? cfg.reduce_slots : 1, cfg.reduce_bytes, kWeighted>;
    ReduceRowRing reduce[kReduces ? cfg.reduce_warps : 1];
    using ReturnRing = RowRing<cfg.pull_slots, cfg.pull_bytes, false, cfg.verifies, cfg.scale_bytes(cfg.pull_bytes)>;
    ReturnRing rings[cfg.return_forward_warps > 0 ? cfg.return_forward_warps : 1];
    u64 owners[cfg.pull_warps][kItemsOpen];  // by open item: one bit for each rank that has a part of its token
    u32 headers_seen;                        // 1: the tagged words of all ranks have arrived
};

// By warp that pushes: the content of the packet that it casts.
template <CombineConfig cfg, bool casts = cfg.casts() && cfg.domains() == 1>
struct CastShared {};
template <CombineConfig cfg>
struct CastShared<cfg, true> {
    alignas(16) u64 content[cfg.reduce_warps][align_up(cfg.packet_lines, kStepLines) * kLineWords + 1];
};

// One domain: by reduce warp, pieces of rows that are cast.
template <CombineConfig cfg, bool rings = (cfg.reduce_slots > 0 && cfg.domains() == 1)>
struct ReduceShared {};
template <CombineConfig cfg>
struct ReduceShared<cfg, true> {
    using ReduceRowRing = RowRing<cfg.reduce_slots, cfg.reduce_bytes, cfg.weighted && cfg.layout != Layout::flat>;
    ReduceRowRing reduce[cfg.reduce_warps];
};

template <CombineConfig cfg>
struct CombineShared : CastShared<cfg>, ReduceShared<cfg> {
    using PullRing =
        RowRing<cfg.pull_slots, cfg.pull_bytes, cfg.single_rows_travel() || cfg.unsummed, cfg.verifies, cfg.scale_bytes(cfg.pull_bytes)>;
    PullRing pull[cfg.pull_warps];
    StepCounters<cfg.in_place ? 1 : cfg.reduce_warps> staged;  // work items of this block
    StepCounters<cfg.pull_warps> pulled;                       // chunks of this block
    CombineArgs args;
    Begin begin;
    RoundHeader mine;
    RoundHeader headers[cfg.ranks];
    SourceTokens sent[cfg.ranks];  // by source rank, from the route
    RowRange pushed[cfg.ranks];    // by source rank: its rows here, if they travel in packets
    u64 wait_begun;                // in the thread that counts waits for packets: when the wait began. Here, as registers are scarce
    u32 missing;                   // 1: a round header did not arrive
    i32 is_invalid;                // 1: the round is invalid
    u64 masked;                    // the ranks that take no part: see Mask
    Forwarders<cfg.ranks, cfg.scaleup_ranks()> forwarders;  // several domains
};

template <CombineConfig cfg>
MOECOMM_FN ScaleoutShared<cfg>& scaleout_shared(CombineShared<cfg>& shared) {
    return *reinterpret_cast<ScaleoutShared<cfg>*>(reinterpret_cast<u8*>(&shared) + align_up<i32>(sizeof(shared), 128));
}
// Several domains: the rings of return-forward warps, for their puts.
template <class Transport, CombineConfig cfg>
MOECOMM_FN typename Transport::Ring* put_rings(CombineShared<cfg>& shared) {
    using Scaleout = ScaleoutShared<cfg>;
    return reinterpret_cast<typename Transport::Ring*>(reinterpret_cast<u8*>(&scaleout_shared(shared)) +
                                                       align_up<i32>(sizeof(Scaleout), 128));
}

template <CombineConfig config, class T>
struct CombineCall {
    static constexpr CombineConfig cfg = config;
    using Transport = T;
    // Verified rounds: words of a token in CombineArgs::added_hashes, one for each rank and, with several domains, two for each domain; and
    // the words that a forwarder tells beside a sum: the hash of the sum, and that of each rank's row in it.
    static constexpr i32 kHashWords = align_up(cfg.ranks + (cfg.domains() > 1 ? 2 * cfg.domains() : 0), 2);
    static constexpr i32 kToldWords = cfg.verifies && cfg.domains() > 1 ? 1 + cfg.scaleup_ranks() : 0;
    static constexpr i32 kToldBytes = align_up(8 * kToldWords, 16);
    static constexpr i32 kPacketBytes = cfg.packet_lines * kLineBytes, kTokenBytes = cfg.packets_of_row() * kPacketBytes;

    const CombineArgs& a;  // in shared memory
    Transport transport;
    Round round;
    CombineShared<config>& shared;
    bool all_in_packets;        // the rows of every source rank travel in packets
    bool leaves_early = false;  // several domains: direct rows do (scaleout_direct.cuh)

    MOECOMM_FN i32 me() const { return a.ctx.rank; }
    MOECOMM_FN auto domains() const { return Domains<cfg.ranks, cfg.scaleup_ranks()>{me()}; }
    // The transport for other domains, as in DispatchCall; a return-forward warp puts through put_channel.
    MOECOMM_FN Transport credit_channel() const { return Transport{a.ctx, channel_of_credits(transport)}; }
    MOECOMM_FN Transport put_channel(i32 warp) const {
        Transport own{a.ctx, channel_of_rows(transport)};
        own.pass_through(put_rings<T>(shared)[warp]);
        return own;
    }
    MOECOMM_FN i32 posters() const { return blocks_of_channel(transport) * max(2 * cfg.return_forward_warps, cfg.pull_warps); }
    MOECOMM_FN auto& scaleout() const { return scaleout_shared<cfg>(shared); }
    MOECOMM_FN const WindowLayout& window() const { return a.ctx.window; }
    MOECOMM_FN const Shape& shape() const {
        if constexpr (cfg.domains() > 1) return shared.forwarders.shape;
        return a.ctx.shape;
    }
    MOECOMM_FN i64 grads_at() const { return shape().staged_row_bytes - cfg.grads_bytes(); }  // in a staged row
    MOECOMM_FN u8* staged_row(i32 rank, i32 source_rank, i32 token) const {
        return transport.template peer_ptr<u8>(rank, staged_at(window(), shape(), source_rank, token));
    }
    // Several domains: offset of the place where this rank reduces its row of a token of `source_rank`.
    MOECOMM_FN u64 reduced_row_at(i32 source_rank, i32 token) const {
        if (leaves_early && direct_to(source_rank)) {
            const i32 nth = source_rank % cfg.scaleup_ranks();
            return direct_row_at(window(), shape(), round.tag, domains().first() + nth, token);
        }
        return staged_at(window(), shape(), source_rank, token);
    }
    // True if each row reduced here has a place of its own (CombineArgs::reduced_rows).
    MOECOMM_FN bool has_reduced_rows() const { return cfg.domains() == 1 && !cfg.own_weights && a.reduced_rows != 0; }
    MOECOMM_FN i64 reduced_row_pitch() const { return cfg.staged_bytes() + (a.weight_grads != 0 ? cfg.grads_bytes() : 0); }
    // Several domains: the sums of a ring in `returned` lie close together, so that those of consecutive tokens leave in one put. All ranks
    // agree on the wire and on whether there are gradients. A round that uses other sizes begins after all ranks have ended this one.
    MOECOMM_FN i64 sum_bytes() const {
        if (a.weight_grads != 0) return shape().staged_row_bytes;
        return align_up<i64>(moecomm::staged_bytes(cfg.wire, cfg.hidden), 16) + kToldBytes;
    }
    // Place of the told words in a sum: before its gradients.
    MOECOMM_FN i64 told_at() const { return (a.weight_grads != 0 ? grads_at() : sum_bytes()) - kToldBytes; }
    // Verified rounds: one of the words of CombineArgs::added_hashes for a token of this rank.
    MOECOMM_FN u64* added_hash(i32 token, i32 word) const {
        return reinterpret_cast<u64*>(a.added_hashes) + static_cast<i64>(token) * kHashWords + word;
    }
    // Offset, in the source rank's window, of the sum of a token from `domain`. return_sum_at: in a column of the forwarder's, from which
    // it is put.
    MOECOMM_FN u64 returned_sum_at(i32 domain, i32 token) const {
        return returned_at(window(), shape(), domain, 0) + token % shape().ring_tokens * sum_bytes();
    }
    MOECOMM_FN u64 return_sum_at(i32 column, i32 token) const {
        return second_half(window().returned, window().heap) + (returned_sum_at(column, token) - window().returned);
    }
    // Address of the gradients that `rank`, possibly in another domain, has for a token of this rank.
    MOECOMM_FN const u8* grads_of(i32 rank, i32 token) const {
        if (const RoundHeader& from = shared.headers[rank]; from.combine.rows != 0) {
            const i32 slot = reinterpret_cast<const i32*>(a.route.token_slot)[static_cast<i64>(token) * cfg.ranks + rank];
            return transport.template peer_ptr<u8>(rank, from.combine.rows) + (slot + 1) * static_cast<i64>(from.combine.pitch) -
                   cfg.grads_bytes();
        }
        if (domains().reaches(rank)) return staged_row(rank, me(), token) + grads_at();
        if (direct()) return transport.template local<u8>(direct_row_at(window(), shape(), round.tag, rank, token)) + grads_at();
        return transport.template local<u8>(returned_sum_at(rank / cfg.scaleup_ranks(), token)) + grads_at();
    }
    // Offset of the flag of `from` at the rank of this domain that pulls the rows of `source_rank`.
    MOECOMM_FN u64 reduced_flag(i32 source_rank, i32 from, i32 chunk) const {
        if constexpr (cfg.domains() == 1) return reduced_at(window(), shape(), from, chunk);
        return reduced_for(window(), shape(), source_rank, from, chunk);
    }
    // Offset in this rank's window of the flag that a chunk of a direct source rank is staged. Such a source rank gives no credits, so the
    // flag uses the place of a credit.
    MOECOMM_FN u64 staged_flag(i32 source_rank, i32 chunk) const {
        return credit_at(window(), shape(), source_rank, chunk, shared.sent[source_rank].chunk_tokens);
    }
    MOECOMM_FN i32 chunks() const { return count_chunks(a.num_tokens, a.chunk_tokens); }
    // True if other domains send rows of this rank's tokens direct; direct_to: if this rank sends those of `source_rank` direct.
    MOECOMM_FN bool direct() const { return goes_direct(shape(), a.num_tokens); }
    MOECOMM_FN bool direct_to(i32 source_rank) const {
        return cfg.domains() > 1 && !domains().reaches(source_rank) && goes_direct(shape(), shared.sent[source_rank].num_tokens);
    }
    // True if rows of this rank for its own tokens are not staged: flat rows that are not cast travel unchanged, and the pull warps of this
    // rank can read them from y. Gradients of weights lie behind a staged row.
    MOECOMM_FN bool reads_y(i32 source_rank) const {
        return cfg.domains() == 1 && cfg.layout == Layout::flat && !cfg.casts() && !cfg.in_place && source_rank == me() &&
               a.weight_grads == 0;
    }
    // Number of chunks that are staged for a source rank.
    MOECOMM_FN i32 chunks_of(i32 source_rank) const {
        return in_packets(source_rank) || reads_y(source_rank)
                   ? 0
                   : count_chunks(shared.sent[source_rank].num_tokens, shared.sent[source_rank].chunk_tokens);
    }

    // True if rows go to a source rank in packets. The same rule as Packets.carry in moecomm/base/packets.py, by which the source rank
    // chooses its kernel. All ranks know its inputs: how many tokens each rank sent, and that no rank passes gradients of weights.
    MOECOMM_FN bool in_packets(i32 source_rank) const {
        if (cfg.domains() > 1 || cfg.verifies || cfg.unsummed) return false;
        const i32 tokens = shared.sent[source_rank].num_tokens;
        const bool few = tokens <= kPacketTokens && tokens * cfg.topk <= kMostPacketEntries;
        return a.weight_grads == 0 && few && shape().packet_bytes > 0 && static_cast<i64>(tokens) * kTokenBytes <= shape().packet_bytes;
    }
    // Offset, in the source rank's window, of a piece of the row that `owner` has for a token.
    MOECOMM_FN u64 packet_at(i32 owner, i32 token, i32 piece) const {
        return packets_at(window(), shape(), round.tag, owner) + static_cast<u64>(token * kTokenBytes + piece * kPacketBytes);
    }

    MOECOMM_FN OutputRow out_of(i32 token) const {
        return {reinterpret_cast<u8*>(a.out) + token * a.out_stride,
                a.bias != 0 ? reinterpret_cast<const u8*>(a.bias) + token * a.bias_stride : nullptr, token};
    }
    template <i32 n>
    MOECOMM_FN void load_bias(const OutputRow& out, i32 column, float (&bias)[n]) const {
        constexpr Type type = cfg.wide_bias ? Type::fp32 : cfg.type;
        load_columns<type>(out.bias + column * bytes_of(type), bias);
    }
    // Adds the bias to n columns of a token's sum, unless the sum starts from it, rounds once, and stores the columns for the caller.
    template <i32 n>
    MOECOMM_FN void store_out(const OutputRow& out, i32 column, float (&sum)[n]) const {
        if (!cfg.bias_first && out.bias != nullptr) {
            float bias[n];
            load_bias(out, column, bias);
#pragma unroll
            for (i32 i = 0; i < n; ++i) sum[i] = __fadd_rn(sum[i], bias[i]);
        }
        store_columns<cfg.type>(out.row + column * bytes_of(cfg.type), sum);
    }
    template <i32 n>
    MOECOMM_FN void store_out(i32 token, i32 column, float (&sum)[n]) const {
        store_out(out_of(token), column, sum);
    }
};

}  // namespace moecomm
