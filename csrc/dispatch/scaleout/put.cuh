// Tokens for other domains: one letter a token and domain, made in our own window by the send warps (the row and its scales) and the
// describe warp (what stands before them), and put to its relay by the put warps.
#pragma once
#include "../call.cuh"

namespace moecomm {

// The letter to a domain: Landed, entries, slots, row, scales, as it will lie at the relay.
template <class Call>
MOECOMM_FN u8* send_slot(const Call& c, i32 domain, i32 token) {
    return c.transport.template local<u8>(send_slot_at(c.window(), c.shape(), domain, token));
}

// By a warp, before it writes a letter of the chunk: until all relays have stored what was in its places.  False when one has not.
template <class Call>
MOECOMM_FN bool await_send_slots(const Call& c, i32 chunk) {
    const i32 before = chunk - ring_chunks(c.shape(), c.a.chunk_tokens);
    bool free = true;
    for (i32 n = lane_id(); before >= 0 && free && n < c.domains().kCount - 1; n += kWarp)
        free = await_signal(c, c.transport, Phase::drained, kReceiveCredit, c.domains().other(n), before, c.a.chunk_tokens);
    return __all_sync(kAllLanes, free);
}

// By a warp: the tokens of a chunk, a bit each, of which a domain has a rank.
template <class Call>
MOECOMM_FN u32 scaleout_tokens(const Call& c, i32 domain, i32 chunk) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 token = chunk * c.a.chunk_tokens + lane_id();
    bool any = false;
    if (token < c.chunk_end(chunk)) {
        const auto* slots =
            reinterpret_cast<const i32*>(c.a.route.token_slot) + static_cast<i64>(token) * cfg.ranks + domain * cfg.scaleup_ranks();
        for (i32 i = 0; i < cfg.scaleup_ranks(); ++i) any = any || slots[i] >= 0;
    }
    return __ballot_sync(kAllLanes, any);
}

// By the describe warp: what stands before the rows in the letters of a chunk.
template <class Call>
MOECOMM_FN void write_heads(const Call& c, i32 chunk) {
    constexpr DispatchConfig cfg = Call::cfg;
    for (i32 n = 0; n < c.domains().kCount - 1; ++n) {
        const i32 domain = c.domains().other(n);
        for (u32 left = scaleout_tokens(c, domain, chunk); left != 0; left &= left - 1) {
            const i32 token = chunk * c.a.chunk_tokens + __ffs(left) - 1;
            u8* to = send_slot(c, domain, token);
            if (lane_id() == 0) *reinterpret_cast<Landed*>(to) = Landed{c.round.tag, token, {}};
            auto* entries = reinterpret_cast<Entry*>(to + sizeof(Landed));
            if (lane_id() < cfg.topk) {
                const i64 entry = static_cast<i64>(token) * cfg.topk + lane_id();
                const i32 owner = reinterpret_cast<const i32*>(c.a.route.token_owner)[entry];
                i32 local = -1;
                if (!cfg.repeat && owner >= 0) local = c.local_at(entry);
                entries[lane_id()] = {owner, reinterpret_cast<const i32*>(c.a.route.token_rows)[entry], local, c.weight_at(entry)};
            }
            const auto* slots = reinterpret_cast<const i32*>(c.a.route.token_slot) + static_cast<i64>(token) * cfg.ranks;
            if (lane_id() < cfg.scaleup_ranks())
                reinterpret_cast<i32*>(entries + cfg.topk)[lane_id()] = slots[domain * cfg.scaleup_ranks() + lane_id()];
        }
    }
    __syncwarp();
}

// By a warp: each token of a chunk to each rank of a domain that wants it.
template <class Call, class Transport>
MOECOMM_FN bool put_direct(const Call& c, const Transport& channel, i32 domain, i32 chunk, u64 bytes) {
    constexpr DispatchConfig cfg = Call::cfg;
    for (u32 left = scaleout_tokens(c, domain, chunk); left != 0; left &= left - 1) {
        const i32 token = chunk * c.a.chunk_tokens + __ffs(left) - 1;
        const i32 first = domain * cfg.scaleup_ranks(), from = lane_id() < cfg.scaleup_ranks() ? first + lane_id() : first;
        const i32 slot = reinterpret_cast<const i32*>(c.a.route.token_slot)[static_cast<i64>(token) * cfg.ranks + from];
        const u64 send_slot = send_slot_at(c.window(), c.shape(), domain, token);
        const u64 there = direct_at(c.window(), c.shape(), c.round.tag, c.me(), token);
        for (u32 wanted = __ballot_sync(kAllLanes, lane_id() < cfg.scaleup_ranks() && slot >= 0); wanted != 0; wanted &= wanted - 1)
            if (!put(c, channel, Phase::payload, first + __ffs(wanted) - 1, there, send_slot, bytes)) return false;
    }
    return true;
}

// By a put warp, which has put all letters of its block: to all ranks of other domains.
template <class Call, class Transport>
MOECOMM_FN void signal_owners(const Call& c, const Transport& channel) {
    constexpr DispatchConfig cfg = Call::cfg;
    static_assert(cfg.put_warps <= 1, "a put warp speaks for its block");
    const i32 parts = min(c.senders, ceil_div(c.a.num_tokens, c.a.chunk_tokens));
    for (i32 n = lane_id(); n < cfg.ranks - cfg.scaleup_ranks(); n += kWarp) {
        const i32 rank = (c.domains().first() + cfg.scaleup_ranks() + n) % cfg.ranks;
        if (!signal_direct(c, channel, Phase::payload, rank, parts, c.share.first_chunk == 0)) return;
    }
}

// By the put warps, each of which has every put_warps-th chunk of the block: once the letters of a chunk are written, they go, and then the
// signal that all of them have landed.
template <class Call>
MOECOMM_FN void put_send_slots(const Call& c, i32 warp) {
    constexpr DispatchConfig cfg = Call::cfg;
    const auto channel = c.channel();
    const bool direct = c.direct();
    const u64 bytes = landed_bytes(c.shape(), cfg.row_bytes, cfg.scale_bytes);
    for (i32 chunk = c.share.first_chunk + warp; chunk < c.share.end_chunk; chunk += cfg.put_warps) {
        if (__any_sync(kAllLanes, !c.shared.sent.await(c.round, c.rotation_step_of(chunk - c.share.first_chunk)))) return;
        for (i32 n = 0; n < c.domains().kCount - 1; ++n) {
            const i32 domain = c.domains().other(n), forwarder = c.domains().counterpart(domain);
            if (direct) {
                if (!put_direct(c, channel, domain, chunk, bytes)) return;
                continue;
            }
            for (u32 left = scaleout_tokens(c, domain, chunk); left != 0; left &= left - 1) {
                const i32 token = chunk * c.a.chunk_tokens + __ffs(left) - 1;
                const u64 from = send_slot_at(c.window(), c.shape(), domain, token);
                if (!put(c, channel, Phase::payload, forwarder, receive_at(c.window(), c.shape(), c.domains().own(), token), from, bytes))
                    return;
            }
            bool signaled = true;
            if (lane_id() == 0) signaled = signal_chunk(c, channel, Phase::payload, kLanded, domain, chunk, c.a.chunk_tokens);
            if (!__all_sync(kAllLanes, signaled)) return;
        }
    }
    if (direct && c.share.first_chunk < c.share.end_chunk) signal_owners(c, channel);
}

}  // namespace moecomm
