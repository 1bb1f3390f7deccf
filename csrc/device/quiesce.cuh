// Quiesce before ranks go on without others (Buffer.mask()), on a transport whose puts the host can neither see nor cancel: wait until
// all puts and adds of the ranks of other domains have arrived, then reset the signals.
//
// Each rank adds to its agreement_signal at every peer, once through each channel, behind all puts and adds of that channel. When the
// signal has the value of the agreement, nothing of that rank is in flight. These signals are never reset: a rank whose agreement failed,
// or that was masked for a while, continues from the sum that it has added.
#pragma once
#include "../protocol/resumed.h"
#include "between_rounds.cuh"
#include "between_rounds_args.h"
#include "copy.cuh"

namespace moecomm {

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

}  // namespace moecomm
