// What the parts of one combine share: arguments, transport, the round, and the block's shared memory.
#pragma once
#include "../device/bulk.cuh"
#include "../device/cast.cuh"
#include "../device/copy.cuh"
#include "../device/launch.cuh"
#include "../device/step_counters.cuh"
#include "../device/tagged_words.cuh"
#include "../transport/scaleout.cuh"

namespace moecomm {

// A piece of a row that a warp makes out of the same piece of others.
struct Item {
    i32 sources;  // pieces it is made of
    i32 column;   // first
    i32 token;    // at its home; -1: nothing to store
    i32 domain;   // return: of the home
    i32 step;     // return: the unit that ends so, -1 if none does
};

// The sum of a token, and what is added to it.
struct Out {
    u8* row;
    const u8* bias;
    i32 token;
    MOECOMM_FN explicit operator bool() const { return row != nullptr; }
};

// Flat rows here.
struct Rows {
    i32 first, count;
};

constexpr i32 kItemsOpen = 8;  // whose sources are loading

// What a role says when it is asked for its next item.
enum class Next { item, later, none };  // later: it would have to wait

// A warp's own: pieces on their way in, and whose they are.
template <i32 slots, i32 bytes>
struct RowRing {
    static constexpr i32 kSlots = slots, kBytes = bytes;
    alignas(128) u8 data[slots][bytes];
    u64 full[slots];
    Item items[kItemsOpen];
};

// What several domains need besides, behind CombineShared.
template <CombineConfig cfg>
struct ScaleoutShared {
    RowRing<cfg.pull_slots, cfg.pull_bytes> rings[cfg.return_forward_warps > 0 ? cfg.return_forward_warps : 1];
    u64 owners[cfg.pull_warps][kItemsOpen];  // the ranks that have a part of the token of an open item, a bit each
    u32 headers_seen;                        // everybody's mail has come
};

template <CombineConfig cfg>
struct CombineShared {
    RowRing<cfg.pull_slots, cfg.pull_bytes> pull[cfg.pull_warps];
    StepCounters<cfg.in_place ? 1 : cfg.reduce_warps> staged;  // units of this block
    StepCounters<cfg.pull_warps> pulled;                       // chunks of this block
    CombineArgs args;
    Begin begin;
    RoundHeader mine;
    RoundHeader headers[cfg.ranks];
    Sent sent[cfg.ranks];    // of the route
    Rows pushed[cfg.ranks];  // of homes that come in packets
    u32 missing;             // a notice did not come
    i32 is_invalid;          // the ranks do not agree
};

template <CombineConfig cfg>
MOECOMM_FN ScaleoutShared<cfg>& scaleout_shared(CombineShared<cfg>& shared) {
    return *reinterpret_cast<ScaleoutShared<cfg>*>(reinterpret_cast<u8*>(&shared) + align_up<i32>(sizeof(shared), 128));
}

template <CombineConfig config, class T>
struct CombineCall {
    static constexpr CombineConfig cfg = config;
    using Transport = T;
    static constexpr i32 kPacketBytes = cfg.packet_lines * kLineBytes, kTokenBytes = cfg.packets_of_row() * kPacketBytes;

    const CombineArgs& a;  // in shared memory
    Transport transport;
    Round round;
    CombineShared<config>& shared;
    bool all_in_packets;  // every home comes so

    MOECOMM_FN i32 me() const { return a.ctx.rank; }
    MOECOMM_FN auto domains() const { return Domains<cfg.ranks, cfg.scaleup_ranks()>{me()}; }
    // As in DispatchCall.
    MOECOMM_FN Transport channel() const { return Transport{a.ctx, static_cast<i32>(blockIdx.x) % transport.channels()}; }
    MOECOMM_FN i32 posters() const { return ceil_div(static_cast<i32>(gridDim.x), transport.channels()) * cfg.warps(); }
    MOECOMM_FN auto& scaleout() const { return scaleout_shared<cfg>(shared); }
    MOECOMM_FN const WindowLayout& window() const { return a.ctx.window; }
    MOECOMM_FN const Shape& shape() const { return a.ctx.shape; }
    MOECOMM_FN i64 grads_at() const { return shape().staged_row_bytes - cfg.grads_bytes(); }  // in a staged row
    MOECOMM_FN u8* staged_row(i32 rank, i32 source_rank, i32 token) const {
        return transport.template peer_ptr<u8>(rank, staged_at(window(), shape(), source_rank, token));
    }
    // Whether rows reduced here have a place each, and how far apart: a row and, where there are any, gradients behind it.
    MOECOMM_FN bool has_reduced_rows() const { return cfg.domains() == 1 && !cfg.own_weights && a.reduced_rows != 0; }
    MOECOMM_FN i64 sum_pitch() const { return cfg.staged_bytes() + (a.weight_grads != 0 ? cfg.grads_bytes() : 0); }
    // Where `rank`, which may be of another domain, has left the gradients of our token.
    MOECOMM_FN const u8* grads_of(i32 rank, i32 token) const {
        if (const RoundHeader& from = shared.headers[rank]; from.x != 0) {
            const i32 slot = reinterpret_cast<const i32*>(a.route.token_slot)[static_cast<i64>(token) * cfg.ranks + rank];
            return transport.template peer_ptr<u8>(rank, from.x) + (slot + 1) * static_cast<i64>(from.pitch) - cfg.grads_bytes();
        }
        if (domains().reaches(rank)) return staged_row(rank, me(), token) + grads_at();
        if (direct()) return transport.template local<u8>(direct_row_at(window(), shape(), round.tag, rank, token)) + grads_at();
        return transport.template local<u8>(returned_at(window(), shape(), rank / cfg.scaleup_ranks(), token)) + grads_at();
    }
    // The flag of `from` at whoever pulls the rows of `home` in our domain.
    MOECOMM_FN u64 reduced_flag(i32 source_rank, i32 from, i32 chunk) const {
        if constexpr (cfg.domains() == 1) return reduced_at(window(), shape(), from, chunk);
        return reduced_for(window(), shape(), source_rank, from, chunk);
    }
    // In our window: a chunk of a home that rows go straight to is staged.  Such a home gives no credits, whose place this is.
    MOECOMM_FN u64 staged_flag(i32 source_rank, i32 chunk) const {
        return credit_at(window(), shape(), source_rank, chunk, shared.sent[source_rank].chunk_tokens);
    }
    MOECOMM_FN i32 chunks() const { return count_chunks(a.num_tokens, a.chunk_tokens); }
    // Whether what other domains have of our tokens comes straight, and whether what we have of those of `home`, in another, goes so.
    MOECOMM_FN bool direct() const { return goes_direct(shape(), a.num_tokens); }
    MOECOMM_FN bool direct_to(i32 source_rank) const {
        return cfg.domains() > 1 && !domains().reaches(source_rank) && goes_direct(shape(), shared.sent[source_rank].num_tokens);
    }
    // Chunks that are staged for a home.
    MOECOMM_FN i32 chunks_of(i32 source_rank) const {
        return in_packets(source_rank) ? 0 : count_chunks(shared.sent[source_rank].num_tokens, shared.sent[source_rank].chunk_tokens);
    }

    // Whether the rows of a home's tokens go there in packets: the rule of Packets.carry in moecomm/core/packets.py, by which the home
    // chooses its kernel.  It rests on what all ranks know alike: what each of them sent, and that nobody has gradients of weights.
    MOECOMM_FN bool in_packets(i32 source_rank) const {
        if (cfg.domains() > 1) return false;
        const i32 tokens = shared.sent[source_rank].num_tokens;
        const bool few = tokens <= kPacketTokens && tokens * cfg.topk <= kMostPacketEntries;
        return a.weight_grads == 0 && few && shape().packet_bytes > 0 && static_cast<i64>(tokens) * kTokenBytes <= shape().packet_bytes;
    }
    // In the home's window: a piece of the row that `owner` has for a token.
    MOECOMM_FN u64 packet_at(i32 owner, i32 token, i32 piece) const {
        return packets_at(window(), shape(), round.tag, owner) + static_cast<u64>(token * kTokenBytes + piece * kPacketBytes);
    }

    MOECOMM_FN Out out_of(i32 token) const {
        return {reinterpret_cast<u8*>(a.out) + token * a.out_stride,
                a.bias != 0 ? reinterpret_cast<const u8*>(a.bias) + token * a.bias_stride : nullptr, token};
    }
    // The sum of a token's columns, to the caller.
    template <i32 n>
    MOECOMM_FN void store_out(const Out& out, i32 column, float (&sum)[n]) const {
        if (out.bias != nullptr) {
            float bias[n];
            constexpr Type type = cfg.wide_bias ? Type::fp32 : cfg.type;
            load_columns<type>(out.bias + column * bytes_of(type), bias);
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
