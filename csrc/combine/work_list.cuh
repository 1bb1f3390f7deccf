// What is reduced and staged: chunks of all homes, shared out among the blocks.
#pragma once
#include "call.cuh"

namespace moecomm {

// A chunk of a home's tokens.
struct Work {
    i32 source_rank, chunk, chunk_tokens;  // chunk -1: there is no such chunk
};

// Units that a block comes to, turn after turn.  The first chunks of all homes come before the second of any; and twice, where there are
// several domains: first those of homes that what we have goes straight to, then the others'.  What goes straight is put before anything
// is staged for others, because it waits for no place, and its home for all of it.
template <class Call>
struct WorkList {
    static constexpr CombineConfig cfg = Call::cfg;
    const Call& c;
    const i32 all, turns;

    MOECOMM_FN explicit WorkList(const Call& call)
        : c(call),
          all(most_chunks(call) * cfg.ranks),
          turns(ceil_div(max((cfg.domains() > 1 ? 2 : 1) * all - static_cast<i32>(blockIdx.x), 0), static_cast<i32>(gridDim.x))) {}
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

    // By one thread, after what it has seen of the turn: its home hears that the rows are there, or who relays for it.
    MOECOMM_FN void tell(i32 step) const {
        const Work work = (*this)[step];
        if (work.chunk < 0) return;
        fence_async();  // the home reads with bulk copies
        c.transport.fence();
        if (is_first_pass(step)) {  // return warps put it straight
            c.transport.post(c.me(), c.staged_flag(work.source_rank, work.chunk), word_signal(c.round.tag, work.chunk));
        } else {
            c.transport.post(c.domains().local(work.source_rank), c.reduced_flag(work.source_rank, c.me(), work.chunk),
                             tag_signal(c.round.tag));
        }
    }

  private:
    MOECOMM_FN i32 nth(i32 step) const { return blockIdx.x + gridDim.x * step; }
    MOECOMM_FN i32 in_pass(i32 step) const { return nth(step) - (cfg.domains() > 1 && !is_first_pass(step) ? all : 0); }
};

// By the flag warp: homes hear of their chunks once all reduce warps are through with them, of as many at once as are complete by then.
// The fence takes microseconds while links are full, which those that reduce have better use for, and one is enough for all.
template <class Call>
MOECOMM_FN bool raise_flags(const Call& c) {
    const WorkList<Call> work_list(c);
    for (i32 step = 0, end; step < work_list.turns; step = end) {
        const i32 last = min(work_list.turns, step + kWarp);
        bool came = true;
        end = step + 1;
        if (lane_id() == 0) {
            came = c.shared.staged.await(c.round, step);
            while (came && end < last && c.shared.staged.await_no_longer(end)) ++end;
        }
        if (!__all_sync(kAllLanes, came)) return false;
        end = __shfl_sync(kAllLanes, end, 0);
        if (step + lane_id() < end) work_list.tell(step + lane_id());
    }
    return true;
}

}  // namespace moecomm
