// Scale-out operations of kernels on a transport that puts: bounded waits for room, signals that are set to a value, tagged words.
#pragma once
#include "../device/tagged_words.cuh"
#include "forwarders.cuh"
#include "transport.cuh"

namespace moecomm {

// Report a broken path to a peer as a lost peer: fill the record and set the abort words in this domain. Called by any thread; once a
// round.
__device__ __noinline__ void report_broken(Round r, Phase phase, i32 peer) {
    if (!claim_record(r)) return;
    const u32 word = abort_word(Failure::peer_lost, peer);
    write_record(r, phase, {Failure::peer_lost, Argument::none, peer, 0, 0}, 0);
    for (i32 p = 0; p < r.ctx.shape.ranks; ++p)
        if (r.ctx.peers[p] != 0) compare_exchange(reinterpret_cast<u32*>(r.ctx.peers[p] + r.ctx.window.abort), 0, word);
}

// Channels of a block's puts and of its credits. Credits have channels of their own where there are two or more: behind rows, a credit
// would come when the rows have left.
template <class Transport>
MOECOMM_FN i32 channel_of_rows(const Transport& transport) {
    return static_cast<i32>(blockIdx.x) % max(transport.channels() / 2, 1);
}
template <class Transport>
MOECOMM_FN i32 channel_of_credits(const Transport& transport) {
    const i32 of_rows = transport.channels() / 2;
    return of_rows + static_cast<i32>(blockIdx.x) % (transport.channels() - of_rows);
}
// The most blocks that share a channel.
template <class Transport>
MOECOMM_FN i32 blocks_of_channel(const Transport& transport) {
    return ceil_div(static_cast<i32>(gridDim.x), max(transport.channels() / 2, 1));
}

// Wait until `posts` puts or adds on this channel, counting those of all threads that post on it, will not block. Called by one thread
// before a put or an add. False on timeout, abort or a broken path; the failure record is then filled.
template <class Transport>
MOECOMM_FN bool await_room(const Round& r, const Transport& transport, Phase phase, i32 peer, i32 posts) {
    i32 room = 0;
    const auto settled = [&] {
        room = transport.has_room(peer, posts);
        return room != 0;
    };
    if (!wait_for(r, phase, peer, posts, settled, [] { return 0ll; })) return false;
    if (room < 0) report_broken(r, phase, peer);
    return room > 0;
}

// await_room, by all lanes of a warp, before it puts.
template <class Call, class Transport>
MOECOMM_FN bool await_room_for_put(const Call& c, const Transport& transport, Phase phase, i32 peer) {
    bool room = true;
    if (lane_id() == 0) room = await_room(c.round, transport, phase, peer, c.posters());
    return __all_sync(kAllLanes, room);
}

// Transport::put once there is room. Called by all lanes of a warp; orders what the put orders. False in all lanes on failure (record
// filled).
template <class Call, class Transport>
MOECOMM_FN bool put(const Call& c, const Transport& transport, Phase phase, i32 peer, u64 to, u64 from, u64 bytes) {
    if (!await_room_for_put(c, transport, phase, peer)) return false;
    transport.put(peer, to, from, bytes);
    return true;
}
// Transport::put_ahead, likewise. Ends the warp's puts ahead if there is no room.
template <class Call, class Transport>
MOECOMM_FN bool put_ahead(const Call& c, const Transport& transport, Phase phase, i32 peer, u64 to, u64 from, u64 bytes) {
    const bool room = await_room_for_put(c, transport, phase, peer);
    room ? transport.put_ahead(peer, to, from, bytes) : transport.settle();
    return room;
}

// The runs of consecutive bits in a mask of tokens, from the lowest on. Each run leaves in one put.
struct Runs {
    u32 left;
    i32 first = 0, count = 0;  // of the current run

    MOECOMM_FN bool next() {
        if (left == 0) return false;
        first = __ffs(left) - 1;
        const u32 after = ~(left >> first);
        count = after != 0 ? __ffs(after) - 1 : kWarp - first;
        left = first + count < kWarp ? left >> (first + count) << (first + count) : 0;
        return true;
    }
};

// The add that sets a signal of `kind` (domains.h), of a ring, at its peer to `chunk` of this round. This rank is the signal's only writer
// and keeps its last value; a thread that sets another chunk has acquired a credit for the last one. Called by one thread, which must then
// post the add.
struct Add {
    u64 which, amount;
};
template <class Call>
MOECOMM_FN Add add_of_chunk(const Call& c, u64 kind, const PeerRing& ring, i32 chunk, i32 chunk_tokens) {
    auto* signaled = own<u64>(c.a.ctx, signal_value_at(c.window(), place_signal(c.shape(), kind, ring.column, chunk, chunk_tokens)));
    const u64 value = word_signal(c.round.tag, chunk), before = load_relaxed(signaled);
    store_relaxed(signaled, value);
    return {place_signal(c.shape(), kind, ring.there, chunk, chunk_tokens), value - before};
}
// Signal a chunk without a put. Called by one thread; ordered like Transport::add. False if there is no room (record filled).
template <class Call, class Transport>
MOECOMM_FN bool signal_chunk(const Call& c, const Transport& transport, Phase phase, u64 kind, const PeerRing& ring, i32 chunk,
                             i32 chunk_tokens) {
    if (!await_room(c.round, transport, phase, ring.peer, c.posters())) return false;
    const Add add = add_of_chunk(c, kind, ring, chunk, chunk_tokens);
    transport.add(ring.peer, add.which, add.amount);
    return true;
}
// Signal a chunk behind its last put, in one message where the library can. Called by all lanes of a warp; ordered like Transport::add.
// False in all lanes if there is no room (record filled).
template <class Call, class Transport>
MOECOMM_FN bool put_and_signal_chunk(const Call& c, const Transport& transport, Phase phase, u64 kind, const PeerRing& ring, i32 chunk,
                                     i32 chunk_tokens, u64 to, u64 from, u64 bytes) {
    bool room = true;
    Add add{};
    if (lane_id() == 0) {
        room = await_room(c.round, transport, phase, ring.peer, c.posters());
        if (room) add = add_of_chunk(c, kind, ring, chunk, chunk_tokens);
    }
    if (!__all_sync(kAllLanes, room)) return false;
    transport.put_add(ring.peer, to, from, bytes, __shfl_sync(kAllLanes, add.which, 0), __shfl_sync(kAllLanes, add.amount, 0));
    return true;
}
// True if the peer of a ring has signaled chunk `said`; await_signal waits for it. Called by one thread; both acquire.
// await_signal is false on timeout or abort; the failure record is then filled.
template <class Call, class Transport>
MOECOMM_FN bool is_signaled(const Call& c, const Transport& transport, u64 kind, i32 column, i32 said, i32 chunk_tokens) {
    return transport.signal_value(place_signal(c.shape(), kind, column, said, chunk_tokens)) == word_signal(c.round.tag, said);
}
template <class Call, class Transport>
MOECOMM_FN bool await_signal(const Call& c, const Transport& transport, Phase phase, u64 kind, i32 peer, i32 column, i32 said,
                             i32 chunk_tokens) {
    return wait_for(
        c.round, phase, peer, said, [&] { return is_signaled(c, transport, kind, column, said, chunk_tokens); },
        [&] { return static_cast<i64>(signal_word(transport.signal_value(place_signal(c.shape(), kind, column, said, chunk_tokens)))); });
}

// Signal to `peer` that all direct puts of this round are issued. Called by one thread of each of `parts` warps after the warp's last put;
// exactly one passes `first`. The adds sum up to the round's value only when all parts have added. Ordered like Transport::add. False if no
// room (record filled).
template <class Call, class Transport>
MOECOMM_FN bool signal_direct(const Call& c, const Transport& transport, Phase phase, i32 peer, i32 parts, bool first) {
    if (!await_room(c.round, transport, phase, peer, c.posters())) return false;
    u64 amount = 1;
    if (first) {
        auto* signaled = own<u64>(c.a.ctx, signal_value_at(c.window(), direct_signal(c.shape(), c.round.tag, peer)));
        amount = tag_signal(c.round.tag) - load_relaxed(signaled) - static_cast<u64>(parts - 1);
        store_relaxed(signaled, tag_signal(c.round.tag));
    }
    transport.add(peer, direct_signal(c.shape(), c.round.tag, c.me()), amount);
    return true;
}
// True if `from` has signaled its direct puts; await_direct waits for it. Called by one thread; both acquire. await_direct is false on
// timeout or abort; the failure record is then filled.
template <class Call>
MOECOMM_FN bool has_direct_arrived(const Call& c, i32 from) {
    return c.transport.signal_value(direct_signal(c.shape(), c.round.tag, from)) == tag_signal(c.round.tag);
}
template <class Call>
MOECOMM_FN bool await_direct(const Call& c, Phase phase, i32 from) {
    return wait_for(
        c.round, phase, from, c.round.tag, [&] { return has_direct_arrived(c, from); },
        [&] { return static_cast<i64>(signal_tag(c.transport.signal_value(direct_signal(c.shape(), c.round.tag, from)))); });
}

// Put the first `words` tagged words of this rank to the ranks of other domains, from their place in this rank's window, then signal.
// Called by all warps of the grid, one warp a peer. put_ahead(peer), called by all lanes, puts data before the words on the same channel,
// so that a peer with the words has the data; false: it failed. On failure the warp returns early; the failure record is filled. The source
// is reused two rounds later, when the peers' tagged words of the round between have shown that the put has arrived.
template <class Call, class PutAhead>
MOECOMM_FN void send_tagged_words(const Call& c, i32 words, PutAhead put_ahead) {
    constexpr auto cfg = Call::cfg;
    const u64 tagged_words = tagged_word(c.round, c.me(), 0);
    for (i32 step = blockIdx.x + gridDim.x * warp_id(); step < cfg.ranks; step += gridDim.x * cfg.warps()) {
        const i32 peer = rotated<cfg.ranks>(c.me(), step);
        if (c.domains().reaches(peer) || is_in(c.shared.masked, peer)) continue;
        bool in_time = true;
        u64 seen = 0;
        for (i32 i = lane_id(); in_time && i < words; i += kWarp)
            in_time = wait_word(c.round, Phase::grid, c.me(), tagged_word(c.round, c.me(), i), c.round.tag, seen);
        c.transport.fence();  // other blocks may have written the words
        if (!__all_sync(kAllLanes, in_time) || !put_ahead(peer)) return;
        if (!await_room_for_put(c, c.transport, Phase::header, peer)) return;
        c.transport.put_add(peer, tagged_words, tagged_words, words * sizeof(u64), tagged_words_signal(c.me()),
                            tag_signal(kTagStep));  // tagged_words_value
        __syncwarp();
    }
}
template <class Call>
MOECOMM_FN void send_tagged_words(const Call& c, i32 words) {
    send_tagged_words(c, words, [](i32) { return true; });
}

// Wait for the tagged words of all ranks of other domains. Called by threads [thread, thread + stride, ...) of a block, before a barrier of
// them; acquires. A peer may already have sent those of the next round. False on timeout or abort; the failure record is then filled.
template <class Call>
MOECOMM_FN bool await_tagged_words(const Call& c, i32 thread, i32 stride) {
    for (i32 from = thread; from < Call::cfg.ranks; from += stride) {
        if (c.domains().reaches(from) || is_in(c.shared.masked, from)) continue;
        const auto signal = [&] { return c.transport.signal_value(tagged_words_signal(from)); };
        const auto in_time = [&] { return have_tagged_words_arrived(signal(), c.round.tag); };
        if (in_time()) continue;
        const u64 begun = now_ns();
        const bool arrived =
            wait_for(c.round, Phase::header, from, c.round.tag, in_time, [&] { return static_cast<i64>(signal_tag(signal())); });
        if (blockIdx.x == 0) add_counter(c.a.ctx, Counter::wait_header, from, now_ns() - begun);
        if (!arrived) return false;
    }
    return true;
}

}  // namespace moecomm
