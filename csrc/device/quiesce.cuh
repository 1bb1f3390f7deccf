// Quiet before ranks go on without others (Buffer.mask()), on a transport whose puts the host can neither see nor recall: all that the
// ranks of other domains have put here has arrived, and signals begin anew.
//
// Each rank adds to a signal of each other one, through every channel, so behind all puts and adds of the channel. A signal that has
// reached the number of the agreement shows that nothing is on its way from that rank. These signals alone are never set back: a rank
// that was lost in the middle of an agreement, or was masked for some, goes on where its adds have been counted.
#pragma once
#include "../protocol/resumed.h"
#include "between_rounds.cuh"
#include "between_rounds_args.h"
#include "copy.cuh"
#include "grid.cuh"

namespace moecomm {

// Values of a signal that belong to an agreement: one for each channel.
constexpr u64 kMostChannels = 64;

// Let the signal of this rank at `peer` reach the number of the agreement when all channels have added to it. Called by one thread; false
// if there is no room in time.
template <class Transport>
MOECOMM_FN bool announce_agreement(const QuiesceArgs& a, const Deadline& deadline, i32 peer) {
    auto* announced = reinterpret_cast<u64*>(a.ctx.peers[a.ctx.rank] + signal_value_at(a.ctx.window, agreement_signal(a.ctx.shape, peer)));
    for (i32 channel = Transport(a.ctx).channels(); channel-- > 0;) {
        const Transport transport(a.ctx, channel);
        if (!await_poll(deadline, [&] { return transport.has_room(peer, 1); })) return false;
        const u64 amount = channel > 0 ? 1 : a.agreement * kMostChannels - *announced;
        *announced += amount;
        transport.add(peer, agreement_signal(a.ctx.shape, a.ctx.rank), amount);
    }
    return true;
}

// Called by all threads of one block, at least one a rank; no kernel of a round runs. If nothing is missing, signals are those of a rank
// that goes on after the round. Until all ranks have done this, none begins a round.
template <class Transport>
MOECOMM_FN void quiesce(const QuiesceArgs& a) {
    const Shape& shape = a.ctx.shape;
    const i32 peer = static_cast<i32>(threadIdx.x);
    const Deadline deadline = deadline_between_rounds(a.ctx);
    const Transport transport(a.ctx);
    bool is_missing = false;
    if (peer < shape.ranks && puts_to(a.ctx, a.members, peer)) {
        const auto has_come = [&] { return transport.signal_value(agreement_signal(shape, peer)) >= a.agreement * kMostChannels; };
        is_missing = !announce_agreement<Transport>(a, deadline, peer) || wait_until(deadline, has_come) != Waited::ok;
    }
    const u32 missing = __ballot_sync(kAllLanes, is_missing);
    if (peer < kMaxRanks && lane_id() == 0) store_release(reinterpret_cast<u32*>(a.missing) + peer / kWarp, missing);
    if (barrier_sync_any(1, blockDim.x, is_missing)) return;
    for (u64 which = threadIdx.x; which < signals(shape); which += blockDim.x) {
        transport.set_signal(which, resumed_signal(shape.ranks, static_cast<u32>(a.last_round), which));
        *reinterpret_cast<u64*>(a.ctx.peers[a.ctx.rank] + signal_value_at(a.ctx.window, which)) = 0;
    }
}

}  // namespace moecomm
