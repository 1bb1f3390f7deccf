// Counters of warps that do the same sequence of steps, each at its own pace. The last warp of a step learns that it is the last.
#pragma once
#include "bulk.cuh"
#include "wait.cuh"

namespace moecomm {

constexpr i32 kOpenSteps = 16;  // steps by which the warps may be apart

template <i32 warps>
struct StepCounters {
    u32 done[kOpenSteps];  // 0 at first; every kOpenSteps-th step counts on in the same place

    // Count this warp's part of a step as done; true for the last warp. Called by one thread of each warp, once for each step, in order.
    // Releases this thread's writes and acquires the earlier arrivals' (acq_rel, cta). A warp far ahead first waits for the earlier step;
    // false on failure (record filled).
    MOECOMM_FN bool arrive(const Round& r, i32 step) {
        u32* counter = &done[step % kOpenSteps];
        const u32 earlier = step / kOpenSteps * warps;
        if (earlier != 0 && !reach(r, counter, earlier)) return false;
        u32 before;
        asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(counter)) : "memory");
        return before + 1 == earlier + warps;
    }
    // Wait until all warps have done the step. Called by one thread of another warp. Acquires their writes, so that the thread may release
    // them to the system. False on timeout or abort; the failure record is then filled.
    MOECOMM_FN bool await(const Round& r, i32 step) const {
        const bool in_time = reach(r, &done[step % kOpenSteps], (step / kOpenSteps + 1) * warps);
        asm volatile("fence.acq_rel.cta;" ::: "memory");
        return in_time;
    }
    // True if all warps have done the step. Called like `await`, with its order, but does not wait and cannot fail.
    MOECOMM_FN bool is_done(i32 step) const {
        const bool in_time =
            *const_cast<const volatile u32*>(&done[step % kOpenSteps]) >= static_cast<u32>((step / kOpenSteps + 1) * warps);
        asm volatile("fence.acq_rel.cta;" ::: "memory");
        return in_time;
    }

  private:
    MOECOMM_FN static bool reach(const Round& r, const volatile u32* counter, u32 n) {
        return wait_for(r, Phase::grid, r.ctx.rank, n, [&] { return *counter >= n; }, [&] { return static_cast<i64>(*counter); });
    }
};

// Count a warp's part of a step as done, written with ordinary stores and with bulk stores that bulk_wait has completed. Called by a whole
// warp. True in all lanes of the warp that completes the step; each lane may then release the writes of all warps. False also on failure
// (record filled).
template <i32 warps>
MOECOMM_FN bool complete_step(StepCounters<warps>& counters, const Round& r, i32 step) {
    __syncwarp();  // orders all lanes' stores before lane 0's release
    bool last = false;
    if (threadIdx.x % kWarp == 0) last = counters.arrive(r, step);
    last = __shfl_sync(kAllLanes, last, 0);
    __syncwarp();  // passes lane 0's acquire on to all lanes
    return last;
}

}  // namespace moecomm
