// Warps of a block that do a chunk of work together, each at its own pace, and find out which of them was last.
#pragma once
#include "bulk.cuh"
#include "wait.cuh"

namespace moecomm {

constexpr i32 kOpenSteps = 16;  // that the warps may be apart

template <i32 warps>
struct StepCounters {
    u32 done[kOpenSteps];  // 0 at first; every kOpenSteps-th turn counts on in the same place

    // By one thread of each warp, once for each turn, in the order of the turns: true for the last.  What the others have written
    // before is then seen by this thread, and by others after a barrier with it.  A warp that is far ahead waits for the earlier turn.
    MOECOMM_FN bool arrive(const Round& r, i32 step) {
        u32* counter = &done[step % kOpenSteps];
        const u32 earlier = step / kOpenSteps * warps;
        if (earlier != 0 && !reach(r, counter, earlier)) return false;
        u32 before;
        asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(counter)) : "memory");
        return before + 1 == earlier + warps;
    }
    // By another thread: until all warps have come to the turn; then it may release what they have written before.
    MOECOMM_FN bool await(const Round& r, i32 step) const {
        const bool came = reach(r, &done[step % kOpenSteps], (step / kOpenSteps + 1) * warps);
        asm volatile("fence.acq_rel.cta;" ::: "memory");
        return came;
    }
    // The same where it need not wait; else false.
    MOECOMM_FN bool await_no_longer(i32 step) const {
        const bool came = *const_cast<const volatile u32*>(&done[step % kOpenSteps]) >= static_cast<u32>((step / kOpenSteps + 1) * warps);
        asm volatile("fence.acq_rel.cta;" ::: "memory");
        return came;
    }

  private:
    MOECOMM_FN static bool reach(const Round& r, const volatile u32* counter, u32 n) {
        return wait_for(r, Phase::grid, r.ctx.rank, n, [&] { return *counter >= n; }, [&] { return static_cast<i64>(*counter); });
    }
};

// A whole warp has done its part of a turn, with ordinary stores and with bulk stores that bulk_wait has seen complete.  True in all lanes
// of the warp that completes the turn: each of them may release what all warps of the turn have written.
template <i32 warps>
MOECOMM_FN bool complete_step(StepCounters<warps>& turns, const Round& r, i32 step) {
    __syncwarp();  // what follows is the release of all lanes' stores, and at last, to the system, of all warps'
    bool last = false;
    if (threadIdx.x % kWarp == 0) last = turns.arrive(r, step);
    last = __shfl_sync(kAllLanes, last, 0);
    __syncwarp();  // what lane 0 has acquired is acquired by all
    return last;
}

}  // namespace moecomm
