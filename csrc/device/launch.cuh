// First steps of a kernel: arguments, programmatic dependent launch, the round's tag, the abort word.
#pragma once
#include "grid.cuh"
#include "trace.cuh"

namespace moecomm {

// Copy the arguments to shared memory. Called by all threads; a __syncthreads follows. Constant memory is fetched one line at a time, on
// first touch; this copy fetches all lines at once.
template <class Args>
MOECOMM_FN void copy_args(Args& to, const Args& from, i32 threads) {
    static_assert(sizeof(Args) % sizeof(u64) == 0, "whole words");
    for (i32 i = threadIdx.x; i < static_cast<i32>(sizeof(Args) / sizeof(u64)); i += threads)
        reinterpret_cast<u64*>(&to)[i] = reinterpret_cast<const u64*>(&from)[i];
}

// Wait until the earlier kernels of the stream have ended and their writes are visible. Called by any thread; has no deadline.
// A kernel may be launched while the kernel before it still runs (programmatic dependent launch). Until this returns it may touch only its
// arguments and its shared memory. Two kernels work before they call it, because the kernel before them allowed their launch only after it
// had waited for all earlier ones: a dispatch of row descriptors, which follows the kernel that publishes rows, and the last kernel of a
// layer (fused/reduce.cuh).
MOECOMM_FN void await_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Allow the launch of the next kernel once all blocks of this one have called this, so that all are resident. Called by any thread of each
// block. Rounds of few tokens call it. Rounds of many tokens do not, as they run on: the next round's blocks would take SMs that a
// concurrent GEMM wants. Kernels of an expert layer call it as they begin, or when they have received from all ranks: they then need no
// other rank's kernel.
MOECOMM_FN void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// State of the round that a block reads before it communicates.
struct Begin {
    u32 tag;
    u32 aborted;  // not 0: the Buffer was aborted
};
// Read the round. Called by one thread of each block; a __syncthreads makes `begin` visible to the others. Relaxed loads; cannot fail.
MOECOMM_FN void read_round(const Context& ctx, Begin& begin) {
    const u32 last = load_relaxed(&own_state(ctx)->round), aborted = load_relaxed(deadline_of(ctx).abort_here);
    begin.tag = round_tag(last + 1);
    begin.aborted = aborted;
}

// Called by all threads of a block after that __syncthreads. False if the Buffer was aborted before `phase`; the failure record is then
// filled.
MOECOMM_FN bool not_aborted(const Round& r, const Begin& begin, Phase phase) {
    if (begin.aborted == 0) return true;
    if (threadIdx.x == 0) report_failure(r, Waited::aborted, phase, r.ctx.rank, r.tag, r.tag, 0);
    return false;
}
// not_aborted for a kernel that is a round of its own; the last thread also counts the round.
MOECOMM_FN bool begin_round(const Round& r, const Begin& begin, i32 threads) {
    if (!not_aborted(r, begin, Phase::header)) return false;
    if (static_cast<i32>(threadIdx.x) == threads - 1) count_round(r.ctx, r.tag);
    return true;
}

}  // namespace moecomm
