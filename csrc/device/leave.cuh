// Last tagged words of a rank that closes its Buffer (moecomm/backends/leave.py), for ranks of other domains, which the host cannot reach.
#pragma once
#include "../protocol/deadline.h"
#include "../protocol/domains.h"
#include "../transport/transport.cuh"

namespace moecomm {

struct LeaveArgs {
    u64 window, link;         // of this rank
    u64 signals;              // WindowLayout::signals
    u64 tagged_words, bytes;  // at this offset in every window; this rank's window holds the words to send
    u64 abort_here, abort_host, timeout_ns;
    i32 rank, ranks, domain_ranks, pad;
};
static_assert(sizeof(LeaveArgs) == 80, "as leave.py packs it");

// Poll until poll() returns 1 (done), as opposed to 0 (not yet) or -1 (failed). Called by one thread; false on failure, timeout or abort.
template <class Poll>
MOECOMM_FN bool await_poll(const Deadline& deadline, Poll poll) {
    i32 found = 0;
    const bool ended = wait_until(deadline, [&] { return (found = poll()) != 0; }) == Waited::ok;
    return ended && found > 0;
}

// Put the words to each rank of other domains. Called by one warp. Best effort: words still unsent at the deadline are dropped; their
// receivers have deadlines of their own. The signal follows the put in the transport's order.
template <class Transport>
MOECOMM_FN void leave(const LeaveArgs& a) {
    __shared__ Context ctx;
    const bool is_leader = threadIdx.x == 0;
    if (is_leader) {
        ctx.rank = a.rank;
        ctx.peers[a.rank] = a.window;
        ctx.link = a.link;
        ctx.window.signals = a.signals;
    }
    __syncwarp();
    const Transport transport(ctx);
    const Deadline deadline{a.timeout_ns, reinterpret_cast<const u32*>(a.abort_here), reinterpret_cast<const u32*>(a.abort_host)};
    for (i32 peer = 0; peer < a.ranks; ++peer) {
        if (peer / a.domain_ranks == a.rank / a.domain_ranks) continue;
        bool goes = true;
        if (is_leader) goes = await_poll(deadline, [&] { return transport.has_room(peer, 2); });
        if (!__all_sync(kAllLanes, goes)) return;
        transport.put(peer, a.tagged_words, a.tagged_words, a.bytes);
        if (!is_leader) continue;
        transport.add(peer, tagged_words_signal(a.rank), tag_signal(kTagStep));  // tagged_words_value
        u64 ticket[2];
        transport.sent_begin(peer, ticket);
        await_poll(deadline, [&] { return transport.sent_ended(peer, ticket); });
    }
}

}  // namespace moecomm
