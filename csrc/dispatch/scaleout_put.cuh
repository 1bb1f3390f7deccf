// Tokens for other domains. Each token has one send slot for each domain that wants it, in this rank's window: send warps write the row and
// its scales, the metadata warp writes the head, and put warps put the slot to the forwarder there.
#pragma once
#include "call.cuh"

namespace moecomm {

// Offset and address of the send slot of a token for a domain: ReceivedHead, entries, flat rows, row, scales, as they will be stored at the
// receiver. `early`: a token that leaves before the ranks agree (scaleout_early.cuh).
template <bool early, class Call>
MOECOMM_FN u64 send_slot_offset(const Call& c, i32 domain, i32 token) {
    if constexpr (early) return direct_at(c.window(), c.shape(), c.round.tag, c.domains().first() + c.domains().nth(domain), token);
    return send_slot_at(c.window(), c.shape(), domain, c.place_of(token));
}
template <bool early, class Call>
MOECOMM_FN u8* send_slot(const Call& c, i32 domain, i32 token) {
    return c.transport.template local<u8>(send_slot_offset<early>(c, domain, token));
}

// Called by a warp before it writes to a send slot of the chunk. Waits for the credits of all forwarders for the chunk that held the slots
// before. Returns false in all lanes if a credit did not come; the failure record is filled.
template <class Call>
MOECOMM_FN bool await_send_slots(const Call& c, i32 chunk) {
    const i32 before = c.turn_of(chunk) - ring_chunks(c.shape(), c.a.chunk_tokens);
    bool free = true;
    for (i32 n = lane_id(); before >= 0 && free && n < c.domains().kCount - 1; n += kWarp) {
        const i32 domain = c.domains().other(n), forwarder = c.shared.forwarders.of(c.domains(), domain);
        free = forwarder < 0 || await_signal(c, c.transport, Phase::drained, kReceiveCredit, forwarder, domain, before, c.a.chunk_tokens);
    }
    return __all_sync(kAllLanes, free);
}

// Called by all lanes of a warp. Returns one bit for each of the tokens [first, end), at most 32, that some rank of the domain wants.
template <class Call>
MOECOMM_FN u32 scaleout_tokens(const Call& c, i32 domain, i32 first, i32 end) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 token = first + lane_id();
    bool any = false;
    if (token < end) {
        const auto* slots =
            reinterpret_cast<const i32*>(c.a.route.token_slot) + static_cast<i64>(token) * cfg.ranks + domain * cfg.scaleup_ranks();
        for (i32 i = 0; i < cfg.scaleup_ranks(); ++i) any |= slots[i] >= 0;  // all loads at once
    }
    return __ballot_sync(kAllLanes, any);
}

template <class Call>
MOECOMM_FN u32 scaleout_tokens(const Call& c, i32 domain, i32 chunk) {
    return scaleout_tokens(c, domain, chunk * c.a.chunk_tokens, c.chunk_end(chunk));
}

// Returns the difference between a place in a head and in the route. Heads of direct tokens, unless these repeat, have the place among this
// rank's entries of an expert, or its tokens for a rank, which is known before the ranks agree; other heads have the final row.
template <bool early, class Call>
MOECOMM_FN i32 shift_of_head(const Call& c, i32 column) {
    if (Call::cfg.repeat || !(early || c.direct_late())) return 0;
    return c.shared.before[column] - (early ? 0 : c.shared.base[column]);
}

// Called by the metadata warp. Writes the heads (all that precedes the row) of the send slots of the tokens [first, end), at most 32, all
// at once: the loads of one token after another would take longer than its row. The last __syncwarp orders the stores for a release by any
// lane. Cannot fail.
template <bool early, class Call>
MOECOMM_FN void write_heads(const Call& c, i32 first, i32 end) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 tokens = end - first;
    const auto* slots = reinterpret_cast<const i32*>(c.a.route.token_slot) + static_cast<i64>(first) * cfg.ranks;
    for (i32 n = 0; n < c.domains().kCount - 1; ++n) {
        const i32 domain = c.domains().other(n);
        const u32 wanted = scaleout_tokens(c, domain, first, end);
        const auto entries_of = [&](i32 nth) {  // null: the domain does not want the token
            return (wanted >> nth & 1) != 0 ? reinterpret_cast<Entry*>(send_slot<early>(c, domain, first + nth) + sizeof(ReceivedHead))
                                            : nullptr;
        };
        if (lane_id() < tokens && entries_of(lane_id()) != nullptr)
            *reinterpret_cast<ReceivedHead*>(send_slot<early>(c, domain, first + lane_id())) =
                ReceivedHead{c.round.tag, first + lane_id(), {}};
#pragma unroll 2
        for (i32 i = lane_id(); i < tokens * cfg.topk; i += kWarp) {
            const i64 entry = static_cast<i64>(first) * cfg.topk + i;
            const i32 owner = reinterpret_cast<const i32*>(c.a.route.token_owner)[entry],
                      row = reinterpret_cast<const i32*>(c.a.route.token_rows)[entry];
            const i32 local = !cfg.repeat && owner >= 0 ? c.local_at(entry, owner) : -1;
            const i32 column = cfg.layout == Layout::flat ? cfg.experts + owner : cfg.ranges().first(owner) + local;
            const i32 place = owner >= 0 ? row + shift_of_head<early>(c, column) : row;
            const float weight = c.weight_at(entry);
            if (Entry* const entries = entries_of(i / cfg.topk)) entries[i % cfg.topk] = {owner, place, local, weight};
        }
#pragma unroll 2
        for (i32 i = lane_id(); i < tokens * cfg.scaleup_ranks(); i += kWarp) {
            const i32 nth = i / cfg.scaleup_ranks(), at = i % cfg.scaleup_ranks();
            const i32 rank = domain * cfg.scaleup_ranks() + at, slot = slots[static_cast<i64>(nth) * cfg.ranks + rank];
            const i32 place = slot >= 0 ? slot + shift_of_head<early>(c, cfg.experts + rank) : slot;
            if (Entry* const entries = entries_of(nth)) reinterpret_cast<i32*>(entries + cfg.topk)[at] = place;
        }
    }
    __syncwarp();
}

// Called by a put warp. Puts each token of a chunk to each rank of other domains that wants it. Of slots that are turned into rows
// meanwhile (finalize_share) only the sign counts, which stays. Returns false in all lanes if a put found no room in time; the failure
// record is filled.
template <bool early, class Call, class Transport>
MOECOMM_FN bool put_direct(const Call& c, const Transport& channel, i32 chunk) {
    constexpr DispatchConfig cfg = Call::cfg;
    const u64 bytes = received_token_bytes(c.shape(), cfg.row_bytes, cfg.scale_bytes);
    for (i32 n = 0; n < c.domains().kCount - 1; ++n) {
        const i32 domain = c.domains().other(n), first = domain * cfg.scaleup_ranks();
        for (u32 left = scaleout_tokens(c, domain, chunk); left != 0; left &= left - 1) {
            const i32 token = chunk * c.a.chunk_tokens + __ffs(left) - 1,
                      from = lane_id() < cfg.scaleup_ranks() ? first + lane_id() : first;
            const i32 slot = reinterpret_cast<const i32*>(c.a.route.token_slot)[static_cast<i64>(token) * cfg.ranks + from];
            const u64 send_slot = send_slot_offset<early>(c, domain, token);
            const u64 there = direct_at(c.window(), c.shape(), c.round.tag, c.me(), token);
            const bool goes =
                lane_id() < cfg.scaleup_ranks() && slot >= 0 && !is_in(c.shared.masked, from);  // a stale repeat has such slots
            for (u32 wanted = __ballot_sync(kAllLanes, goes); wanted != 0; wanted &= wanted - 1)
                if (!put_ahead(c, channel, Phase::payload, first + __ffs(wanted) - 1, there, send_slot, bytes)) return false;
        }
    }
    return true;
}

// Called by each put warp with direct puts, after them. Adds its part to the signal of every rank of other domains. Returns early if there
// is no room for an add; the failure record is filled.
template <class Call, class Transport>
MOECOMM_FN void signal_owners(const Call& c, const Transport& channel, i32 warp) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 chunks = count_chunks(c.a.num_tokens, c.a.chunk_tokens), least = chunks / c.senders, longer = chunks % c.senders;
    const i32 parts = (c.senders - longer) * min(least, cfg.put_warps) + longer * min(least + 1, cfg.put_warps);
    const bool first = c.share.first_chunk == 0 && warp == 0;
    for (i32 n = lane_id(); n < cfg.ranks - cfg.scaleup_ranks(); n += kWarp) {
        const i32 rank = (c.domains().first() + cfg.scaleup_ranks() + n) % cfg.ranks;
        if (!is_in(c.shared.masked, rank) && !signal_direct(c, channel, Phase::payload, rank, parts, first)) return;
    }
}

// Called by each put warp, which handles every put_warps-th chunk of the block, once the block has written its send slots. Puts and signals
// rows that go direct. Returns early if there is no room; the failure record is filled.
template <class Call>
MOECOMM_FN void put_all_direct(const Call& c, i32 warp) {
    const auto channel = c.put_channel(warp);
    for (i32 chunk = c.share.first_chunk + warp; chunk < c.share.end_chunk; chunk += Call::cfg.put_warps)
        if (!put_direct<true>(c, channel, chunk)) return;
    channel.settle();
    if (c.share.first_chunk + warp < c.share.end_chunk) signal_owners(c, channel, warp);
}

// Called by each put warp, which handles every put_warps-th chunk of the block. Waits until all warps have written the chunk's send slots
// (acquire), puts the slots, then signals the chunk to the forwarders. One signal of the warp covers all its direct puts. Returns early if
// a wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN void put_send_slots(const Call& c, i32 warp) {
    constexpr DispatchConfig cfg = Call::cfg;
    using Transport = typename Call::Transport;
    if (c.leaves_early()) return;
    const Transport channel = c.put_channel(warp);
    const bool direct = c.direct_late();
    const u64 bytes = received_token_bytes(c.shape(), cfg.row_bytes, cfg.scale_bytes);
    for (i32 chunk = c.share.first_chunk + warp; chunk < c.share.end_chunk; chunk += cfg.put_warps) {
        if (__any_sync(kAllLanes, !c.shared.chunk_steps.await(c.round, c.step_of_chunk(chunk - c.share.first_chunk)))) {
            channel.settle();
            return;
        }
        if (direct) {
            if (!put_direct<false>(c, channel, chunk)) return;
            continue;
        }
        const i32 turn = c.turn_of(chunk);
        for (i32 n = 0; n < c.domains().kCount - 1; ++n) {
            const i32 domain = c.domains().other(n);
            const PeerRing ring = c.shared.forwarders.ring_to(c.domains(), domain);
            if (ring.peer < 0) continue;
            bool signaled = false;
            for (Runs runs{scaleout_tokens(c, domain, chunk)}; runs.next();) {
                const i32 step = joins_tokens(c.shape(), bytes, Transport::worth_a_message) ? runs.count : 1;
                for (i32 at = 0; at < runs.count; at += step) {
                    const i32 token = turn * c.a.chunk_tokens + runs.first + at;  // its place in the ring
                    const u64 from = send_slot_at(c.window(), c.shape(), domain, token);
                    const u64 to = receive_at(c.window(), c.shape(), ring.there, token);
                    const u64 sent = (step - 1) * c.shape().receive_bytes + bytes;
                    signaled = runs.left == 0 && at + step >= runs.count;  // the last put of the chunk carries its signal
                    if (!(signaled
                              ? put_and_signal_chunk(c, channel, Phase::payload, kReceived, ring, turn, c.a.chunk_tokens, to, from, sent)
                              : put(c, channel, Phase::payload, ring.peer, to, from, sent)))
                        return;
                }
            }
            if (!signaled && lane_id() == 0)  // no token for this domain
                signaled = signal_chunk(c, channel, Phase::payload, kReceived, ring, turn, c.a.chunk_tokens);
            if (__any_sync(kAllLanes, lane_id() == 0 && !signaled)) return;
        }
    }
    channel.settle();
    if (direct && c.share.first_chunk + warp < c.share.end_chunk) signal_owners(c, channel, warp);
}

}  // namespace moecomm
