// The flag warp of a block, with several domains. It raises the flags of reduced chunks, as raise_flags does, and gives the credits for
// pulled chunks. One fence covers all that is complete by then. Earlier, pull warps gave the credits, each behind up to three fences: a
// flat combine of 4096 tokens, rows in the window, by 32 blocks of 4 H200s, two a domain, took 875 us, and 600 us with a ring for all
// tokens, which needs no credits; then it took 705 us (bench/results: domains-h200-4.json at cea8c2a7 and at b156cddd, rings-h200-4.json).
#pragma once
#include "pull.cuh"
#include "work_list.cuh"

namespace moecomm {

// All lanes call all methods together.
template <class Call>
struct FlagWarp {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr i32 kOthers = cfg.domains() - 1;
    // Credits given at once, one post a lane. The channel of credits has room for 2 * return_forward_warps posts of a block (posters()).
    static constexpr i32 kCredits = cfg.return_forward_warps < 4 ? 2 * cfg.return_forward_warps : 8;

    const Call& c;
    const WorkList<Call> work_list;
    const i32 steps;   // work items that this block reduces
    const i32 ring;    // chunks that have a place in the rings of this rank
    i32 chunks_here;   // chunks that this block pulls, if there are credits to give for some
    i32 raised = 0;    // work items whose flags are raised
    i32 credited = 0;  // chunks whose credits are given

    MOECOMM_FN explicit FlagWarp(const Call& call)
        : c(call),
          work_list(call),
          steps(cfg.in_place ? 0 : work_list.steps),
          ring(ring_chunks(call.shape(), call.a.chunk_tokens)),
          chunks_here(call.chunks() > ring ? ceil_div(max(call.chunks() - static_cast<i32>(blockIdx.x), 0), static_cast<i32>(gridDim.x))
                                           : 0) {}

    // Returns false in all lanes if a wait failed; the failure record is filled.
    MOECOMM_FN bool run() {
        while (raised < steps || credited < chunks_here) {
            const volatile i32& is_invalid = c.shared.is_invalid;  // in an invalid round nobody pulls
            if (__any_sync(kAllLanes, is_invalid != 0)) chunks_here = 0;
            const i32 reduced = complete(c.shared.staged, raised, min(steps, raised + kWarp));
            if constexpr (!cfg.in_place) {
                if (lane_id() < reduced) work_list.signal(raised + lane_id());
            }
            raised += reduced;
            const i32 pulled = complete(c.shared.pulled, credited, min(chunks_here, credited + kCredits));
            const i32 given = pulled > 0 ? give(pulled) : 0;
            credited += max(given, 0);
            if (given < 0 || (reduced == 0 && given == 0 && !await_any())) return false;
        }
        return true;
    }

  private:
    MOECOMM_FN i32 chunk_of(i32 nth) const { return blockIdx.x + gridDim.x * nth; }

    // Returns how many steps from `from` to `end` all warps have done, one after the other (acquire).
    template <class Counters>
    MOECOMM_FN static i32 complete(const Counters& counters, i32 from, i32 end) {
        i32 at = from;
        if (lane_id() == 0)
            while (at < end && counters.is_done(at)) ++at;
        at = __shfl_sync(kAllLanes, at, 0);
        __syncwarp();  // passes lane 0's acquire on to all lanes
        return max(at - from, 0);
    }
    // Returns true if the chunk that had this chunk's places before has got its credit (acquire): see await_earlier_credit. Any lane may
    // call it alone.
    MOECOMM_FN bool comes_next(i32 chunk) const {
        const i32 earlier = chunk - ring;
        if (earlier < 0) return true;
        const auto* place = own<const u64>(c.a.ctx, credit_at(c.window(), c.shape(), c.me(), earlier, c.a.chunk_tokens));
        return load_acquire(place) == word_signal(c.round.tag, earlier);
    }
    // Gives credits for up to `pulled` next chunks, one lane a chunk. A chunk whose places are not used again in this round needs no
    // credit. Returns the number of chunks handled. If a signal finds no room, returns -1 in all lanes and fills the failure record.
    MOECOMM_FN i32 give(i32 pulled) const {
        const i32 chunk = chunk_of(credited + lane_id());
        const bool next = lane_id() < pulled && comes_next(chunk);
        const i32 done = __ffs(~__ballot_sync(kAllLanes, next)) - 1;
        const bool gives = lane_id() < done && chunk + ring < c.chunks();
        bool room = true;
#pragma unroll 1
        for (i32 n = 0; n < kOthers; ++n) {
            const PeerRing there = c.shared.forwarders.ring_to(c.domains(), c.domains().other(n));
            if (gives && room && there.peer >= 0)
                room = signal_chunk(c, c.credit_channel(), Phase::reduced, kReturnCredit, there, chunk, c.a.chunk_tokens);
        }
        if (!__all_sync(kAllLanes, room)) return -1;
        const u64 place = credit_at(c.window(), c.shape(), c.me(), chunk, c.a.chunk_tokens);
#pragma unroll 1
        for (i32 step = 0; step < cfg.scaleup_ranks() - 1; ++step) {
            const i32 rank = c.domains().neighbor(step);
            if (gives && c.shared.headers[rank].combine.rows == 0) c.transport.signal(rank, place, word_signal(c.round.tag, chunk));
        }
        __syncwarp();  // own credit last, as in Pull
        if (gives) c.transport.signal(c.me(), place, word_signal(c.round.tag, chunk));
        return done;
    }
    // Waits until there is something to do. Returns false in all lanes if that failed; the failure record is filled.
    MOECOMM_FN bool await_any() const {
        bool in_time = true;
        if (lane_id() == 0) {
            const volatile i32& is_invalid = c.shared.is_invalid;
            const auto any = [&] {
                if (raised < steps && c.shared.staged.is_done(raised)) return true;
                return credited < chunks_here && (is_invalid != 0 || (c.shared.pulled.is_done(credited) && comes_next(chunk_of(credited))));
            };
            in_time = wait_for(c.round, Phase::grid, c.me(), raised, any, [&] { return static_cast<i64>(credited); });
        }
        return __all_sync(kAllLanes, in_time);
    }
};

}  // namespace moecomm
