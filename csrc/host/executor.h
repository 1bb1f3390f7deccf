// The host executor: the same rounds as the GPU kernels, by CPU ranks that map each other's windows.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

// Both block until this rank's part of the round is done.  Nothing is thrown for a failed round: the FailureRecord at `ctx.record` tells.
// Every rank of the Buffer must call, each from a thread or process of its own; one rank makes one call at a time.
void dispatch(const DispatchArgs& args);
void combine(const CombineArgs& args);

// Counts a call of this rank that failed before its rounds were made; the notices of later rounds carry the count.
void count_rejected(const Context& ctx);

// Tells every peer that this rank will take part in no further round.  Does not wait.
void leave(const Context& ctx);

}  // namespace moecomm::host
