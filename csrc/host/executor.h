// The host executor: runs the rounds of the GPU kernels on CPU ranks that map each other's windows.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

class RowChecks;

// Run this rank's part of a round and block until it is done.  A failed or invalid round throws nothing: it leaves a FailureRecord at
// `ctx.record`.  Every rank of the Buffer must call, each from a thread or process of its own; a rank makes one call at a time.
void dispatch(const DispatchArgs& args);
// `checks`: check the rows; all ranks do, or none.
void combine(const CombineArgs& args, RowChecks* checks = nullptr);

// End the round that comes next here on every rank: an error has ended its call while this rank was in no wait.  Leaves a FailureRecord.
void abort_all(const Context& ctx);

// Count a call of this rank that failed before it could start a round.  The headers of later rounds carry the count.
void count_rejected(const Context& ctx);

// Mask this rank at a peer: `rank` takes part in no round until it resumes.  Its own waits end, and it disturbs no other rank.
void exclude(const Context& ctx, i32 rank);

// The number of the last round that has ended here, once all that this rank has sent to other domains has arrived there.
u32 last_round(const Context& ctx);
// Begin anew after `round`, without the ranks of `mask`, when no rank of this Buffer is in a round: what a failed round has left in this
// rank's window is forgotten.
void resume(const Context& ctx, u32 round, const u64* mask);
// The part of it in host memory: the failure record and the host's abort word.  Ranks on GPUs, too.
void forget_failure(const Context& ctx);

// Announce to every peer that this rank takes part in no further round.  Does not wait.
void leave(const Context& ctx);

}  // namespace moecomm::host
