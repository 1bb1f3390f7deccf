// What is reduced and staged: chunks of all homes, shared out among the blocks.
#pragma once
#include "call.cuh"

namespace moecomm {

// A chunk of a home's tokens: a unit of staging.  The first chunks of all homes come before the second of any.
struct Unit {
    i32 home, chunk, chunk_tokens;  // chunk -1: there is no such chunk
};
template <class Call>
MOECOMM_FN i32 home_of(const Call& c, i32 nth, i32 units) {
    return rotated<Call::cfg.ranks>(c.me(), (Call::cfg.domains() > 1 && nth >= units ? nth - units : nth) % Call::cfg.ranks);
}
// Of all homes that what we have does not go straight to: that is put before anything is staged for others, because it waits for no place,
// and its home for all of it.
template <class Call>
MOECOMM_FN Unit unit_at(const Call& c, i32 nth, i32 units) {
    constexpr CombineConfig cfg = Call::cfg;
    const bool first = cfg.domains() > 1 && nth < units;
    const i32 home = home_of(c, nth, units), chunk = (cfg.domains() > 1 && !first ? nth - units : nth) / cfg.ranks;
    const bool here = chunk < c.chunks_of(home) && (cfg.domains() == 1 || first == c.straight_to(home));
    return {home, here ? chunk : -1, c.shared.sent[home].chunk_tokens};
}
template <class Call>
MOECOMM_FN i32 count_units(const Call& c) {
    i32 most = 0;
    for (i32 s = 0; s < Call::cfg.ranks; ++s) most = max(most, c.chunks_of(s));
    return most * Call::cfg.ranks;
}
// Units that a block comes to, turn after turn.
template <class Call>
struct Units {
    const Call& c;
    const i32 all, turns;

    MOECOMM_FN explicit Units(const Call& call)
        : c(call),
          all(count_units(call)),
          turns(ceil_div(max((Call::cfg.domains() > 1 ? 2 : 1) * all - static_cast<i32>(blockIdx.x), 0), static_cast<i32>(gridDim.x))) {}
    MOECOMM_FN i32 nth(i32 turn) const { return blockIdx.x + gridDim.x * turn; }
    MOECOMM_FN i32 home(i32 turn) const { return home_of(c, nth(turn), all); }
    MOECOMM_FN Unit operator[](i32 turn) const { return unit_at(c, nth(turn), all); }

    // By one thread, after what it has seen of the turn: its home hears that the rows are there, or who relays for it.
    MOECOMM_FN void tell(i32 turn) const {
        const Unit unit = (*this)[turn];
        if (unit.chunk < 0) return;
        if (Call::cfg.domains() > 1 && nth(turn) < all) {  // return warps put it straight
            c.transport.post(c.me(), c.staged_flag(unit.home, unit.chunk), word_signal(c.round.tag, unit.chunk));
        } else {
            c.transport.post(c.domains().local(unit.home), c.reduced_flag(unit.home, c.me(), unit.chunk), tag_signal(c.round.tag));
        }
    }
};

// By the flag warp: homes hear of their chunks once all reduce warps are through with them, of as many at once as are complete by then.
// The fence takes microseconds while links are full, which those that reduce have better use for, and one is enough for all.
template <class Call>
MOECOMM_FN bool raise_flags(const Call& c) {
    const Units<Call> units(c);
    for (i32 turn = 0, end; turn < units.turns; turn = end) {
        bool came = true;
        end = turn + 1;
        if (lane_id() == 0) {
            came = c.shared.staged.await(c.round, turn);
            while (came && end < units.turns && c.shared.staged.await_no_longer(end)) ++end;
        }
        if (!__all_sync(kAllLanes, came)) return false;
        end = min(__shfl_sync(kAllLanes, end, 0), turn + kWarp);
        fence_async();  // the home reads with bulk copies
        c.transport.fence();
        if (turn + lane_id() < end) units.tell(turn + lane_id());
    }
    return true;
}

}  // namespace moecomm
