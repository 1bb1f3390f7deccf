// The work list of a block: chunks of all source ranks, which the blocks divide, to be reduced and staged.
#pragma once
#include "call.cuh"

namespace moecomm {

// A work item: a chunk of a source rank's tokens.
struct Work {
    i32 source_rank, chunk, chunk_tokens;  // chunk -1: no such chunk
};

// The work items of a block, by step. The first chunks of all source ranks come before the second chunk of any. With several domains there
// are two passes: first the chunks of direct source ranks, then all other chunks. Direct rows need no free place in a ring, and their
// source rank waits for all of them, so they come before rows of other chunks are staged.
template <class Call>
struct WorkList {
    static constexpr CombineConfig cfg = Call::cfg;
    const Call& c;
    const i32 all, steps;

    MOECOMM_FN explicit WorkList(const Call& call)
        : c(call),
          all(most_chunks(call) * cfg.ranks),
          steps(ceil_div(max((cfg.domains() > 1 ? 2 : 1) * all - static_cast<i32>(blockIdx.x), 0), static_cast<i32>(gridDim.x))) {}
    MOECOMM_FN static i32 most_chunks(const Call& c) {
        i32 most = 0;
        for (i32 s = 0; s < cfg.ranks; ++s) most = max(most, c.chunks_of(s));
        return most;
    }

    MOECOMM_FN bool is_first_pass(i32 step) const { return cfg.domains() > 1 && nth(step) < all; }
    MOECOMM_FN i32 source_rank(i32 step) const { return rotated<cfg.ranks>(c.me(), in_pass(step) % cfg.ranks); }
    MOECOMM_FN Work operator[](i32 step) const {
        const i32 of = source_rank(step), chunk = in_pass(step) / cfg.ranks;
        const bool here = chunk < c.chunks_of(of) && (cfg.domains() == 1 || is_first_pass(step) == c.direct_to(of));
        return {of, here ? chunk : -1, c.shared.sent[of].chunk_tokens};
    }

    // Called by one thread that has acquired all arrivals at the step. Signals the chunk's rows (after a fence) to the source rank or to
    // its forwarder in this domain; direct chunks, to this rank's return-forward warps. Cannot fail.
    MOECOMM_FN void signal(i32 step) const {
        const Work work = (*this)[step];
        if (work.chunk < 0) return;
        fence_async();  // the reader uses bulk copies
        c.transport.fence();
        if (is_first_pass(step)) {  // return-forward warps put it
            c.transport.post(c.me(), c.staged_flag(work.source_rank, work.chunk), word_signal(c.round.tag, work.chunk));
        } else {
            c.transport.post(c.shared.forwarders.local(c.domains(), work.source_rank), c.reduced_flag(work.source_rank, c.me(), work.chunk),
                             tag_signal(c.round.tag));
        }
    }

  private:
    MOECOMM_FN i32 nth(i32 step) const { return blockIdx.x + gridDim.x * step; }
    MOECOMM_FN i32 in_pass(i32 step) const { return nth(step) - (cfg.domains() > 1 && !is_first_pass(step) ? all : 0); }
};

// Called by the flag warp. Signals each work item of the block once all reduce warps have arrived at its step. The fence takes microseconds
// while links are full, so reduce warps leave it to this warp, and one fence covers all items complete by then. Returns false in all lanes
// if a wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN bool raise_flags(const Call& c) {
    const WorkList<Call> work_list(c);
    for (i32 step = 0, end; step < work_list.steps; step = end) {
        const i32 last = min(work_list.steps, step + kWarp);
        bool in_time = true;
        end = step + 1;
        if (lane_id() == 0) {
            in_time = c.shared.staged.await(c.round, step);
            while (in_time && end < last && c.shared.staged.is_done(end)) ++end;
        }
        if (!__all_sync(kAllLanes, in_time)) return false;
        end = __shfl_sync(kAllLanes, end, 0);
        if (step + lane_id() < end) work_list.signal(step + lane_id());
    }
    return true;
}

}  // namespace moecomm
