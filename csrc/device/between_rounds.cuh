// Helpers of kernels that put between rounds.
#pragma once
#include "../protocol/domains.h"
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

}  // namespace moecomm
