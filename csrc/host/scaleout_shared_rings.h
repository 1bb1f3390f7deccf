// Rounds whose rings are divided among the source ranks of masked forwarders (protocol/stand_ins.h).
#pragma once
#include "../protocol/stand_ins.h"
#include "window.h"

namespace moecomm::host {

// Call run(args), with rings of the length that the mask of this rank wants.
template <class Args, class Run>
void with_shared_rings(const Args& args, const Run& run) {
    if (domains(args.ctx.shape) == 1) return run(args);
    Args shared = args;
    const Mask& mask = *at<const Mask>(args.ctx, args.ctx.rank, mask_at(args.ctx.window));
    i32& ring = shared.ctx.shape.ring_tokens;
    ring = shared_ring_tokens(ring, ring_shares(args.ctx.shape, mask.ranks));
    run(shared);
}

}  // namespace moecomm::host
