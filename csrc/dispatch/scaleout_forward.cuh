// The forwarder: tokens of other domains arrive in the receive buffer, and forward warps store them at the ranks of this domain. A forward
// warp waits only for arrivals and for room in the transport, never for credits, which rules out circular waits (csrc/protocol/layout.h).
#pragma once
#include "metadata.cuh"
#include "place.cuh"

namespace moecomm {

// The role of a forward warp: forwards chunks of source ranks in other domains. All lanes call all methods together; methods that wait
// return false in all lanes if the wait failed, and the failure record is filled.
template <class Call>
struct Forward {
    static constexpr DispatchConfig cfg = Call::cfg;
    static constexpr i32 kSlots = cfg.forward_slots, kBytes = cfg.forward_bytes, kPieces = ceil_div(cfg.row_bytes, kBytes);
    static constexpr i32 kAhead = kSlots - 1;  // loads that run ahead: of most rows, all

    const Call& c;
    ForwardRing<cfg>& ring;
    i32 loaded = 0, stored = 0;  // pieces, of all tokens

    // A token in the receive buffer. Lane k holds its k-th entry; lane i its flat row at the i-th rank of this domain, and the addresses
    // of its row and scales there.
    struct Token {
        i32 number;
        const u8* at;
        bool comes;  // the receive buffer holds this token of this round: an expert of this domain wants it
        Entry entry;
        i32 slot;  // -1: not wanted
        u8* row;   // null: not wanted
        u8* scales;
    };

    // True if the source waits for the credit of a turn before it sends a later chunk.
    MOECOMM_FN bool is_owed(const Source& from, i32 turn) const {
        const Turns turns = c.turns_of(from);
        const i32 later = turn + ring_chunks(c.shape(), from.chunk_tokens);
        return later < turns.count() && turns.chunk_at(later) >= 0;
    }
    // Returns the chunk of a turn if this kernel forwards it, else -1, as for source rank -1. The first kernel of a split dispatch forwards
    // those chunks whose credits their sources wait for; the second forwards the rest.
    MOECOMM_FN i32 own_part(i32 source, i32 turn) const {
        if (source < 0) return -1;
        const Source& from = c.shared.sources[source];
        const Turns turns = c.turns_of(from);
        if (turn >= turns.count() || c.direct_from(source)) return -1;
        if (cfg.part != Part::whole && is_owed(from, turn) != (cfg.part == Part::begin)) return -1;
        return turns.chunk_at(turn);
    }

    // Reads a token's head from `arrived`, an offset in the window. An acquire of the source's signal must come before.
    MOECOMM_FN Token read(u64 arrived, i32 number) const {
        Token t{number, c.transport.template local<const u8>(arrived), false, {-1, -1, -1, 0.0f}, -1, nullptr, nullptr};
        const auto* head = reinterpret_cast<const i32*>(t.at);
        t.comes = load_fresh(head) == static_cast<i32>(c.round.tag) && load_fresh(head + 1) == number;
        if (!t.comes) return t;
        const auto* entries = head + sizeof(ReceivedHead) / 4;
        if (lane_id() < cfg.topk) {
            const auto* mine = entries + lane_id() * sizeof(Entry) / 4;
            t.entry = {load_fresh(mine), load_fresh(mine + 1), load_fresh(mine + 2), __int_as_float(load_fresh(mine + 3))};
        }
        if (lane_id() < cfg.scaleup_ranks()) t.slot = load_fresh(entries + cfg.topk * sizeof(Entry) / 4 + lane_id());
        return t;
    }

    // Returns how many of a column earlier source ranks than `source` have, by their tagged words, which have arrived.
    MOECOMM_FN i32 before_source(i32 source, i32 column) const {
        i32 sum = 0;
        for (i32 s = lane_id(); s < source; s += kWarp)
            sum += static_cast<i32>(signal_word(load_relaxed(own<const u64>(c.a.ctx, tagged_word(c.round, s, kHeaderWords + column)))));
        return static_cast<i32>(__reduce_add_sync(kAllLanes, static_cast<u32>(sum)));
    }
    // Turns the places among the source's entries that a direct head has into rows of this rank. Other ranks' entries lose their owner.
    MOECOMM_FN void find_rows(Token& t, i32 source) const {
        if (t.entry.owner != c.me()) t.entry.owner = -1;
        if constexpr (!cfg.repeat && cfg.layout != Layout::flat) {
            const i32 local = min(max(t.entry.local, 0), c.experts_here() - 1);
            i32 before = 0;
            for (u32 left = __ballot_sync(kAllLanes, t.entry.owner >= 0); left != 0; left &= left - 1) {
                const i32 k = __ffs(left) - 1, sum = before_source(source, c.first_expert() + __shfl_sync(kAllLanes, local, k));
                if (lane_id() == k) before = sum;
            }
            const i32 start = c.shared.filled[local] - c.shared.total[c.first_expert() + local];
            if (t.entry.owner >= 0) t.entry.row = row_inside(c, c.me(), start + before + t.entry.row);
        }
    }

    // Finds the addresses of a token's row and scales at the ranks of this domain.
    MOECOMM_FN void find_places(Token& t) const {
        for (u32 wanted = __ballot_sync(kAllLanes, t.slot >= 0); wanted != 0; wanted &= wanted - 1) {
            const i32 lane = __ffs(wanted) - 1, rank = c.domains().first() + lane;
            i32 row = t.slot;
            if constexpr (cfg.layout != Layout::flat)  // the first of the token's rows there
                row = __shfl_sync(kAllLanes, t.entry.row, __ffs(__ballot_sync(kAllLanes, t.entry.owner == rank)) - 1);
            if (lane_id() != lane) continue;
            const RoundHeader& to = c.shared.headers[rank];
            t.row = c.transport.template peer_ptr<u8>(rank, to.dispatch.x) + static_cast<i64>(row) * cfg.row_bytes;
            const i64 of_scales = cfg.scale_columns ? t.slot : row;
            t.scales = c.transport.template peer_ptr<u8>(rank, to.dispatch.scales) + of_scales * cfg.scale_bytes;
        }
    }

    MOECOMM_FN static i32 bytes_of_piece(i32 piece) { return min(kBytes, cfg.row_bytes - piece * kBytes); }
    MOECOMM_FN void load(const u8* row, i32 piece) {
        bulk_wait_read<0>();
        __syncwarp();
        if (lane_id() == 0) bulk_load(ring.data[loaded % kSlots], row + piece * kBytes, bytes_of_piece(piece), &ring.full[loaded % kSlots]);
        ++loaded;
    }
    // Starts to load the row into the warp's ring. store_row must follow.
    MOECOMM_FN void load_row(const Token& t) {
        const u8* row = t.at + received_row(c.shape());
        for (i32 piece = 0; piece < min(kAhead, kPieces); ++piece) load(row, piece);
    }
    // Copies the row through the warp's ring to each rank of this domain that wants it. bulk_wait must follow before a signal.
    MOECOMM_FN void store_row(const Token& t) {
        const u8* row = t.at + received_row(c.shape());
        for (i32 piece = 0; piece < kPieces; ++piece) {
            if (piece + kAhead < kPieces) load(row, piece + kAhead);
            copy_wait(&ring.full[stored % kSlots], stored / kSlots & 1);
            if (t.row != nullptr) bulk_store(t.row + piece * kBytes, ring.data[stored % kSlots], bytes_of_piece(piece));
            __syncwarp();
            bulk_commit();
            ++stored;
        }
    }
    MOECOMM_FN void store_scales(const Token& t) const {
        for (u32 wanted = __ballot_sync(kAllLanes, t.row != nullptr); wanted != 0; wanted &= wanted - 1)
            copy_small(reinterpret_cast<u8*>(__shfl_sync(kAllLanes, reinterpret_cast<u64>(t.scales), __ffs(wanted) - 1)),
                       t.at + received_scales(c.shape(), cfg.row_bytes), cfg.scale_bytes);
    }

    // Writes to the route what a combine needs to know of the token; slots are -1 if the token did not arrive.
    MOECOMM_FN void record_route(i32 source, const Token& t) const {
        auto* kept = reinterpret_cast<i32*>(c.a.route.forwarded) +
                     (static_cast<i64>(source) * c.shape().max_tokens + t.number) * forwarded_words(c.shape());
        if (lane_id() < cfg.topk) {
            kept[lane_id()] = t.entry.row;
            kept[cfg.topk + lane_id()] = t.entry.owner;
        }
        if (lane_id() < cfg.scaleup_ranks()) kept[2 * cfg.topk + lane_id()] = t.slot;
    }

    // Sources of metadata, like Ours in metadata.cuh: for a token in the receive buffer, and for one that came direct.
    struct From {
        i32 rank;
        const i32* slots;  // by rank of this domain
        MOECOMM_FN i32 source() const { return rank; }
        MOECOMM_FN i32 slot_at(i32, i32 of) const { return load_fresh(slots + of); }
    };
    struct FromDirect {
        i32 rank, to, slot;  // at the rank `to` alone
        MOECOMM_FN i32 source() const { return rank; }
        MOECOMM_FN i32 slot_at(i32, i32 of) const { return of == to ? slot : -1; }
    };
    template <class Source>
    MOECOMM_FN void write_metadata(const Source& from, const Token& t) const {
        if (lane_id() >= cfg.topk) return;
        const Metadata e{t.number, lane_id(), t.entry.row, t.entry.owner, t.entry.weight};
        if constexpr (cfg.layout == Layout::flat) {
            write_flat_metadata(c, from, e, t.entry.local);
        } else {
            write_row_metadata(c, from, e);
        }
    }

    // Delivers to this rank a chunk that came direct from any source of another domain. Acquires the source's signal; a fence orders the
    // stores before this rank's own chunk signal.
    MOECOMM_FN bool deliver_direct(i32 source, i32 chunk) {
        const Source& from = c.shared.sources[source];
        bool in_time = true;
        if (lane_id() == 0) in_time = await_direct(c, Phase::payload, source);
        if (!__all_sync(kAllLanes, in_time)) return false;
        fence_async();  // reads of rows come after the signal
        __syncwarp();
        const i32 lane = c.me() - c.domains().first(), before = cfg.repeat ? 0 : before_source(source, cfg.experts + c.me());
        const bool ours = lane_id() == lane;
        i32 first = 0, count = 0;  // flat rows of the chunk here
        for (i32 number = chunk * from.chunk_tokens; number < min((chunk + 1) * from.chunk_tokens, from.num_tokens); ++number) {
            Token t = read(direct_at(c.window(), c.shape(), c.round.tag, source, number), number);
            if (!t.comes) continue;
            if (ours && t.slot >= 0) t.slot = row_inside(c, c.me(), before + t.slot);
            if (!ours) t.slot = -1;
            if (t.slot >= 0 && count++ == 0) first = t.slot;
            load_row(t);
            find_rows(t, source);
            find_places(t);
            if constexpr (!cfg.repeat) write_metadata(FromDirect{source, c.me(), __shfl_sync(kAllLanes, t.slot, lane)}, t);
            store_row(t);
            if constexpr (cfg.scale_bytes > 0) store_scales(t);
        }
        bulk_wait<0>();
        __syncwarp();
        c.transport.fence();
        if (ours) c.transport.post(c.me(), arrived_at(c.window(), c.shape(), source, chunk), chunk_signal(c.round.tag, first, count));
        return true;
    }

    // Forwards a chunk to the ranks of this domain. Acquires the source's signal; a fence orders the stores before the chunk signals, which
    // are posted as if the source rank had sent them. Then gives the source its credit, if a later chunk needs it.
    MOECOMM_FN bool forwarder(i32 source, i32 column, i32 turn, i32 chunk) {
        const Source& from = c.shared.sources[source];
        bool arrived = true;
        if (lane_id() == 0) arrived = await_signal(c, c.transport, Phase::payload, kReceived, source, column, turn, from.chunk_tokens);
        if (!__all_sync(kAllLanes, arrived)) return false;
        fence_async();  // reads of rows come after the signal
        __syncwarp();
        i32 first = 0, count = 0;  // flat rows of the chunk at this lane's rank
        for (i32 number = chunk * from.chunk_tokens; number < min((chunk + 1) * from.chunk_tokens, from.num_tokens); ++number) {
            Token t = read(receive_at(c.window(), c.shape(), column, number + (turn - chunk) * from.chunk_tokens), number);
            if constexpr (!cfg.repeat) record_route(source, t);
            if (!t.comes) continue;
            if (t.slot >= 0 && count++ == 0) first = t.slot;
            load_row(t);
            find_places(t);
            store_row(t);
            if constexpr (cfg.scale_bytes > 0) store_scales(t);
            const auto* slots = reinterpret_cast<const i32*>(t.at + sizeof(ReceivedHead) + cfg.topk * sizeof(Entry));
            if constexpr (!cfg.repeat) write_metadata(From{source, slots - c.domains().first()}, t);
        }
        bulk_wait<0>();
        __syncwarp();
        c.transport.fence();
        if (lane_id() < cfg.scaleup_ranks())
            c.transport.post(c.domains().first() + lane_id(), arrived_at(c.window(), c.shape(), source, chunk),
                             chunk_signal(c.round.tag, first, count));
        bool signaled = true;
        if (lane_id() == 0 && is_owed(from, turn))
            signaled = signal_chunk(c, c.credit_channel(), Phase::payload, kReceiveCredit, PeerRing{source, column, c.domains().own()},
                                    turn, from.chunk_tokens);
        return __all_sync(kAllLanes, signaled);
    }
};

// Called by each forward warp. Delivers chunks of all sources of other domains that send direct; the forward warps of the grid divide the
// chunks. Returns false if a wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN bool deliver_direct(Forward<Call>& role, i32 warp) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 scaleout_ranks = cfg.ranks - cfg.scaleup_ranks();
    const Call& c = role.c;
    const auto source_of = [&](i32 n) { return (c.domains().first() + cfg.scaleup_ranks() + n) % cfg.ranks; };
    i32 most = 0;
    for (i32 n = 0; n < scaleout_ranks; ++n)
        if (c.direct_from(source_of(n))) most = max(most, c.shared.sources[source_of(n)].chunks());
    for (i32 item = blockIdx.x + gridDim.x * warp; item < most * scaleout_ranks; item += gridDim.x * cfg.forward_warps) {
        const i32 source = source_of(item % scaleout_ranks), chunk = item / scaleout_ranks;
        if (!c.direct_from(source) || chunk >= c.shared.sources[source].chunks()) continue;
        if (!role.deliver_direct(source, chunk)) return false;
    }
    return true;
}

// Called by each forward warp. Delivers direct chunks, whose senders wait for nobody, then forwards chunks of all sources that this
// rank forwards for, in turn: a chunk is awaited only after the chunks whose credits its source may wait for. The forward warps of the grid
// divide the chunks. Returns early if a wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN void forwarder(const Call& c, i32 warp) {
    constexpr DispatchConfig cfg = Call::cfg;
    const auto& forwarders = c.shared.forwarders;
    Forward<Call> role{c, c.forward_rings()[warp]};
    if constexpr (cfg.part == Part::whole) {
        if (!deliver_direct(role, warp)) return;
    }
    i32 most = 0;
    const i32 columns = forwarders.count();
    for (i32 n = 0; n < columns; ++n)
        if (const i32 source = forwarders.source_of(c.domains(), n); source >= 0)
            most = max(most, c.turns_of(c.shared.sources[source]).count());
    for (i32 item = blockIdx.x + gridDim.x * warp; item < most * columns; item += gridDim.x * cfg.forward_warps) {
        const i32 nth = item % columns, turn = item / columns, source = forwarders.source_of(c.domains(), nth);
        const i32 chunk = role.own_part(source, turn);
        if (chunk >= 0 && !role.forwarder(source, forwarders.column_of(c.domains(), nth), turn, chunk)) return;
    }
}

// Called by all threads of a block in the first kernel of a split dispatch. Saves the round headers for the second kernel (load_headers):
// by then, the tagged words may belong to later rounds. Cannot fail.
template <class Call>
MOECOMM_FN void save_headers(const Call& c) {
    auto* kept = c.transport.template local<u32>(c.window().split_headers);
    const auto* words = reinterpret_cast<const u32*>(&c.shared.headers[0]);
    for (i32 i = threadIdx.x; i < Call::cfg.ranks * kHeaderWords; i += Call::cfg.threads()) kept[i] = words[i];
}
template <class Call>
MOECOMM_FN void load_headers(const Call& c) {
    const auto* kept = c.transport.template local<const u32>(c.window().split_headers);
    auto* words = reinterpret_cast<u32*>(&c.shared.headers[0]);
    for (i32 i = threadIdx.x; i < Call::cfg.ranks * kHeaderWords; i += Call::cfg.threads()) words[i] = kept[i];
}

}  // namespace moecomm
