// Barriers among the blocks of one launch and the warps of a block. The grid's counters are in State and are 0 again after the launch, so
// that the next launch, or the next replay of a graph, starts clean; after a failure no round follows.
#pragma once
#include "wait.cuh"

namespace moecomm {

// Count this block as arrived; true for the last one. Called by one thread of each block; cannot fail. Releases all that this thread has
// written or acquired, and acquires what earlier blocks released (acq_rel, gpu scope).
MOECOMM_FN bool arrive_last(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    if (before + 1 != gridDim.x) return false;
    *counter = 0;
    return true;
}

// Count the round: the last block to call it stores its number. Called by one thread of each block, after the block has read State::round.
// At the start of the kernel, so that nothing is left to count when rows are done.
MOECOMM_FN void count_round(const Context& ctx, u32 tag) {
    State* state = own_state(ctx);
    if (!arrive_last(&state->blocks_begun)) return;
    store_relaxed(&state->round, round_number(tag));
    add_relaxed(own<u64>(ctx, rounds_counter_at(ctx.window)), 1);
}

// Called by all threads of all blocks, with a counter of State; contains __syncthreads and cannot fail. True in all threads of the block
// that arrives last, which sees the writes of all other blocks.
MOECOMM_FN bool last_block(u32* counter) {
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) last = arrive_last(counter);
    return __syncthreads_or(last);
}

// Barrier among some warps of a block: `barrier` is 1 to 15, `threads` the number of participants. Called by complete warps; orders their
// writes for each other; cannot fail.
MOECOMM_FN void barrier_sync(i32 barrier, i32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
// Arrive at such a barrier without waiting. Threads that wait there see this thread's earlier writes (fence.acq_rel.cta).
MOECOMM_FN void barrier_arrive(i32 barrier, i32 threads) {
    asm volatile("fence.acq_rel.cta;\n\tbar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// barrier_sync that also returns true if `here` is true in any participating thread. Called by complete warps.
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
