// The blocks of one launch.  Their counters are in State and are 0 again afterwards, so that the next launch, or the next replay of a
// graph, finds them clean; after a failure no round follows.
#pragma once
#include "wait.cuh"

namespace moecomm {

// Counts this block in; true for the last.  A release of what this thread has written or seen written, and an acquire of what earlier
// blocks have.
MOECOMM_FN bool arrive_last(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    if (before + 1 != gridDim.x) return false;
    *counter = 0;
    return true;
}

// By one thread of each block, after the block has read `tag` from State::round: the last block counts the round.  At the beginning, so
// that nothing has to be counted when rows are through.
MOECOMM_FN void count_round(const Context& ctx, u32 tag) {
    State* state = own_state(ctx);
    if (arrive_last(&state->begun)) store_relaxed(&state->round, round_number(tag));
}

// Every thread of every block calls it, with a counter of State; true in the block that comes last, which sees what all others wrote.
MOECOMM_FN bool last_block(u32* counter) {
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) last = arrive_last(counter);
    return __syncthreads_or(last);
}

// Some warps of a block meet: `barrier` 1 to 15, `threads` of them in all.
MOECOMM_FN void barrier_sync(i32 barrier, i32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
// The same by those of them who do not wait for the others; who meets them there sees what they have written.
MOECOMM_FN void barrier_arrive(i32 barrier, i32 threads) {
    asm volatile("fence.acq_rel.cta;\n\tbar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Who meets learns whether `here` holds for anybody.
MOECOMM_FN bool barrier_sync_any(i32 barrier, i32 threads, bool here) {
    u32 any;
    asm volatile(
        "{\n\t"
        ".reg .pred p, q;\n\t"
        "setp.ne.u32 p, %3, 0;\n\t"
        "bar.red.or.pred q, %1, %2, p;\n\t"
        "selp.u32 %0, 1, 0, q;\n\t"
        "}"
        : "=r"(any)
        : "r"(barrier), "r"(threads), "r"(static_cast<u32>(here))
        : "memory");
    return any != 0;
}

}  // namespace moecomm
