// Kernels between rounds: `leave` and `quiesce` put to ranks of other domains, `set_placement` writes this rank's table.
#pragma once
#include "../protocol/domains.h"
#include "../protocol/resumed.h"
#include "between_rounds_args.h"
#include "lanes.cuh"
#include "wait.cuh"

namespace moecomm {

// Poll until poll() returns 1 (done), as opposed to 0 (not yet) or -1 (failed). Called by one thread; false on failure, timeout or abort.
template <class Poll>
MOECOMM_FN bool await_poll(const Deadline& deadline, Poll poll) {
    i32 found = 0;
    const bool ended = wait_until(deadline, [&] { return (found = poll()) != 0; }) == Waited::ok;
    return ended && found > 0;
}

// True if `peer` is in another domain and among `ranks` (bits).
MOECOMM_FN bool puts_to(const Context& ctx, u64 ranks, i32 peer) {
    return domain_of(ctx.shape, peer) != domain_of(ctx.shape, ctx.rank) && is_in(ranks, peer);
}

// Put the last tagged words of a rank that closes its Buffer (moecomm/backends/between_rounds.py) to each rank of other domains, which the
// host cannot reach. Called by one warp. Best effort: words still unsent at the deadline are dropped; their receivers have deadlines of
// their own. The signal follows the put in the transport's order.
template <class Transport>
MOECOMM_FN void leave(const LeaveArgs& a) {
    const bool is_leader = threadIdx.x == 0;
    const Transport transport(a.ctx);
    const Deadline deadline = deadline_of(a.ctx);
    for (i32 peer = 0; peer < a.ctx.shape.ranks; ++peer) {
        if (!puts_to(a.ctx, a.members, peer)) continue;
        bool goes = true;
        if (is_leader) goes = await_poll(deadline, [&] { return transport.has_room(peer, 2); });
        if (!__all_sync(kAllLanes, goes)) return;
        transport.put(peer, a.tagged_words, a.tagged_words, a.bytes);
        if (!is_leader) continue;
        transport.add(peer, tagged_words_signal(a.ctx.rank), tag_signal(kTagStep));  // tagged_words_value
        u64 ticket[2];
        transport.sent_begin(peer, ticket);
        await_poll(deadline, [&] { return transport.sent_ended(peer, ticket); });
    }
}

// Steps of an agreement_signal in an agreement; at least the number of channels.
constexpr u64 kMostChannels = 64;

// Raise this rank's signal at `peer` to the value of the agreement, reached when the adds of all channels have arrived. Called by one
// thread; false if there is no room in time.
template <class Transport>
MOECOMM_FN bool announce_agreement(const QuiesceArgs& a, const Deadline& deadline, i32 peer) {
    u64* const announced = own<u64>(a.ctx, signal_value_at(a.ctx.window, agreement_signal(a.ctx.shape, peer)));
    for (i32 channel = Transport(a.ctx).channels(); channel-- > 0;) {
        const Transport transport(a.ctx, channel);
        // Threads post to all peers at once, and a transport may have one queue for all.
        if (!await_poll(deadline, [&] { return transport.has_room(peer, a.ctx.shape.ranks); })) return false;
        const u64 amount = channel > 0 ? 1 : a.agreement * kMostChannels - *announced;
        *announced += amount;
        transport.add(peer, agreement_signal(a.ctx.shape, a.ctx.rank), amount);
    }
    return true;
}

// Quiesce before ranks go on without others (Buffer.mask()), on a transport whose puts the host can neither see nor cancel: wait until
// all puts and adds of the ranks of other domains have arrived, then reset the signals.
//
// Each rank adds to its agreement_signal at every peer, once through each channel, behind all puts and adds of that channel. When the
// signal has the value of the agreement, nothing of that rank is in flight. These signals are never reset: a rank whose agreement failed,
// or that was masked for a while, continues from the sum that it has added.
//
// Called by all threads of one block, at least one for each rank, while no round runs. If nothing is missing, resets the signals for the
// round after last_round. No rank may begin a round before all ranks have returned.
template <class Transport>
MOECOMM_FN void quiesce(const QuiesceArgs& a) {
    const Shape& shape = a.ctx.shape;
    const i32 peer = static_cast<i32>(threadIdx.x);
    const Deadline deadline = deadline_of(a.ctx);
    const Transport transport(a.ctx);
    bool is_missing = false;
    if (peer < shape.ranks && puts_to(a.ctx, a.members, peer)) {
        const auto has_arrived = [&] { return transport.signal_value(agreement_signal(shape, peer)) >= a.agreement * kMostChannels; };
        is_missing = !announce_agreement<Transport>(a, deadline, peer) || wait_until(deadline, has_arrived) != Waited::ok;
    }
    const u32 missing = __ballot_sync(kAllLanes, is_missing);
    if (peer < kMaxRanks && lane_id() == 0) store_release(reinterpret_cast<u32*>(a.missing) + peer / kWarp, missing);
    if (__syncthreads_or(is_missing)) return;
    for (u64 which = threadIdx.x; which < signals(shape); which += blockDim.x) {
        transport.set_signal(which, resumed_signal(shape.ranks, static_cast<u32>(a.last_round), which));
        *own<u64>(a.ctx, signal_value_at(a.ctx.window, which)) = 0;
    }
}

// Write the table of a placement (protocol/placement.h). Called by all threads of one block; cannot fail. Begins when all earlier kernels
// of the stream have ended, so that no round reads words of two tables. A dispatch reads the table before it waits for earlier kernels. It
// may be launched when this kernel has ended, and not before: launch_dependents is never called here, and the words are visible by then.
MOECOMM_FN void set_placement(const SetPlacementArgs& a) {
    for (i32 i = threadIdx.x; i < a.count; i += blockDim.x)
        store_relaxed(reinterpret_cast<u32*>(a.to) + i, reinterpret_cast<const u32*>(a.words)[i]);
    fence_system();
}

}  // namespace moecomm
