// Last tagged words of a rank that closes its Buffer (moecomm/backends/leave.py), for ranks of other domains, which the host cannot reach.
#pragma once
#include "between_rounds.cuh"
#include "between_rounds_args.h"

namespace moecomm {

// Put the words to each rank of other domains. Called by one warp. Best effort: words still unsent at the deadline are dropped; their
// receivers have deadlines of their own. The signal follows the put in the transport's order.
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

}  // namespace moecomm
