// How a kernel begins.
#pragma once
#include "grid.cuh"

namespace moecomm {

// By all threads, before a __syncthreads: the arguments into shared memory.  Constants come a line at a time, when they are first touched,
// one after the other; this way all come at once.
template <class Args>
MOECOMM_FN void copy_args(Args& to, const Args& from, i32 threads) {
    static_assert(sizeof(Args) % sizeof(u64) == 0, "whole words");
    for (i32 i = threadIdx.x; i < static_cast<i32>(sizeof(Args) / sizeof(u64)); i += threads)
        reinterpret_cast<u64*>(&to)[i] = reinterpret_cast<const u64*>(&from)[i];
}

// A kernel may be launched while the one before it in the stream is still running (programmatic dependent launch).  Until this returns it
// touches nothing but its arguments and its shared memory.  Two kernels do, since the one before has waited for all others before it let
// them be launched, and await it last: a dispatch of slips, behind what publishes their rows, and the end of a layer (fused/reduce.cuh).
MOECOMM_FN void await_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The kernel after this one may be launched once all blocks have come here, where all of them are resident.  Rounds of few tokens do that.
// Others are a while yet: the next round's blocks would take multiprocessors that a GEMM beside them wants.  Kernels of a layer of experts
// do it as they begin, or when they have heard of all ranks: nobody else's kernel is then what they still need.
MOECOMM_FN void let_next_kernel_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// What the threads of a block have to know before they speak to anybody.
struct Begin {
    u32 tag;      // of this round
    u32 aborted;  // somebody has called the Buffer off
};
// By one thread of each block, whose others read it after a __syncthreads.
MOECOMM_FN void look_up_round(const Context& ctx, Begin& begin) {
    const u32 last = load_relaxed(&own_state(ctx)->round), aborted = load_relaxed(deadline_of(ctx).abort_here);
    begin.tag = round_tag(last + 1);
    begin.aborted = aborted;
}

// Every thread, after that __syncthreads.  False, and reported, when somebody has called the Buffer off before `phase`.
MOECOMM_FN bool not_aborted(const Round& r, const Begin& begin, Phase phase) {
    if (begin.aborted == 0) return true;
    if (threadIdx.x == 0) report_failure(r, Waited::aborted, phase, r.ctx.rank, r.tag, r.tag, 0);
    return false;
}
// The same for a kernel that is a round; it counts.
MOECOMM_FN bool begin_round(const Round& r, const Begin& begin, i32 threads) {
    if (!not_aborted(r, begin, Phase::header)) return false;
    if (static_cast<i32>(threadIdx.x) == threads - 1) count_round(r.ctx, r.tag);
    return true;
}

}  // namespace moecomm
