// The blocks of one launch meet.  The counters are in State and are 0 again afterwards, so that the next launch, or the next replay of a
// graph, finds them clean; after a failure no round follows.
#pragma once
#include "wait.cuh"

namespace moecomm {

// Orders like a release of all that the block has written (after a __syncthreads) and an acquire of what earlier arrivals have.
MOECOMM_FN u32 arrive(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Every thread of every block calls it.  All blocks are resident at once: the host launches no more than there are multiprocessors.
MOECOMM_FN bool grid_barrier(const Round& r) {
    __syncthreads();
    bool failed = false;
    if (threadIdx.x == 0) {
        State* state = own_state(r.ctx);
        const u32 generation = load_relaxed(&state->generation);  // before we arrive: it changes once we all have
        if (arrive(&state->arrivals) + 1 == gridDim.x) {
            state->arrivals = 0;
            store_release(&state->generation, generation + 1);
        } else {
            failed = !wait_for(
                r, Phase::grid, r.ctx.rank, generation + 1, [&] { return load_acquire(&state->generation) != generation; },
                [&] { return static_cast<i64>(generation); });
        }
    }
    return !__syncthreads_or(failed);
}

// Every thread of every block calls it, with a counter of State; true in the block that comes last, which sees what all others wrote.
MOECOMM_FN bool last_block(u32* counter) {
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
        fence_system();  // what we wrote to peers comes before what the last block tells them
        last = arrive(counter) + 1 == gridDim.x;
        if (last) *counter = 0;
    }
    return __syncthreads_or(last);
}

}  // namespace moecomm
