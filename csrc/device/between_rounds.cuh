// Waits of kernels between rounds, on transports that put.
#pragma once
#include "../protocol/deadline.h"
#include "../protocol/domains.h"
#include "../transport/transport.cuh"

namespace moecomm {

// The abort words and the time of a rank's waits.
MOECOMM_FN Deadline deadline_between_rounds(const Context& ctx) {
    return {ctx.timeout_ns, reinterpret_cast<const u32*>(ctx.peers[ctx.rank] + ctx.window.abort),
            reinterpret_cast<const u32*>(ctx.abort_host)};
}

// Poll until poll() returns 1 (done), as opposed to 0 (not yet) or -1 (failed). Called by one thread; false on failure, timeout or abort.
template <class Poll>
MOECOMM_FN bool await_poll(const Deadline& deadline, Poll poll) {
    i32 found = 0;
    const bool ended = wait_until(deadline, [&] { return (found = poll()) != 0; }) == Waited::ok;
    return ended && found > 0;
}

// True if a kernel between rounds puts to `peer`: it is in another domain, and `ranks` (bits) has it.
MOECOMM_FN bool puts_to(const Context& ctx, u64 ranks, i32 peer) {
    return domain_of(ctx.shape, peer) != domain_of(ctx.shape, ctx.rank) && (ranks >> peer & 1) != 0;
}

}  // namespace moecomm
