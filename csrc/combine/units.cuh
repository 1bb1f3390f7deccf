// What is reduced and staged: chunks of all homes, shared out among the blocks.
#pragma once
#include "call.cuh"

namespace moecomm {

// A chunk of a home's tokens.
struct Unit {
    i32 home, chunk, chunk_tokens;  // chunk -1: there is no such chunk
};

// Units that a block comes to, turn after turn.  The first chunks of all homes come before the second of any; and twice, where there are
// several domains: first those of homes that what we have goes straight to, then the others'.  What goes straight is put before anything
// is staged for others, because it waits for no place, and its home for all of it.
template <class Call>
struct Units {
    static constexpr CombineConfig cfg = Call::cfg;
    const Call& c;
    const i32 all, turns;

    MOECOMM_FN explicit Units(const Call& call)
        : c(call),
          all(most_chunks(call) * cfg.ranks),
          turns(ceil_div(max((cfg.domains() > 1 ? 2 : 1) * all - static_cast<i32>(blockIdx.x), 0), static_cast<i32>(gridDim.x))) {}
    MOECOMM_FN static i32 most_chunks(const Call& c) {
        i32 most = 0;
        for (i32 s = 0; s < cfg.ranks; ++s) most = max(most, c.chunks_of(s));
        return most;
    }

    MOECOMM_FN bool is_first_pass(i32 turn) const { return cfg.domains() > 1 && nth(turn) < all; }
    MOECOMM_FN i32 home(i32 turn) const { return rotated<cfg.ranks>(c.me(), in_pass(turn) % cfg.ranks); }
    MOECOMM_FN Unit operator[](i32 turn) const {
        const i32 of = home(turn), chunk = in_pass(turn) / cfg.ranks;
        const bool here = chunk < c.chunks_of(of) && (cfg.domains() == 1 || is_first_pass(turn) == c.straight_to(of));
        return {of, here ? chunk : -1, c.shared.sent[of].chunk_tokens};
    }

    // By one thread, after what it has seen of the turn: its home hears that the rows are there, or who relays for it.
    MOECOMM_FN void tell(i32 turn) const {
        const Unit unit = (*this)[turn];
        if (unit.chunk < 0) return;
        fence_async();  // the home reads with bulk copies
        c.transport.fence();
        if (is_first_pass(turn)) {  // return warps put it straight
            c.transport.post(c.me(), c.staged_flag(unit.home, unit.chunk), word_signal(c.round.tag, unit.chunk));
        } else {
            c.transport.post(c.domains().local(unit.home), c.reduced_flag(unit.home, c.me(), unit.chunk), tag_signal(c.round.tag));
        }
    }

  private:
    MOECOMM_FN i32 nth(i32 turn) const { return blockIdx.x + gridDim.x * turn; }
    MOECOMM_FN i32 in_pass(i32 turn) const { return nth(turn) - (cfg.domains() > 1 && !is_first_pass(turn) ? all : 0); }
};

// By the flag warp: homes hear of their chunks once all reduce warps are through with them, of as many at once as are complete by then.
// The fence takes microseconds while links are full, which those that reduce have better use for, and one is enough for all.
template <class Call>
MOECOMM_FN bool raise_flags(const Call& c) {
    const Units<Call> units(c);
    for (i32 turn = 0, end; turn < units.turns; turn = end) {
        const i32 last = min(units.turns, turn + kWarp);
        bool came = true;
        end = turn + 1;
        if (lane_id() == 0) {
            came = c.shared.staged.await(c.round, turn);
            while (came && end < last && c.shared.staged.await_no_longer(end)) ++end;
        }
        if (!__all_sync(kAllLanes, came)) return false;
        end = __shfl_sync(kAllLanes, end, 0);
        if (turn + lane_id() < end) units.tell(turn + lane_id());
    }
    return true;
}

}  // namespace moecomm
