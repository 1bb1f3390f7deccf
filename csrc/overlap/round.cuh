// Begin and end of a round, and waits for flags.
#pragma once
#include "../device/grid.cuh"
#include "../device/lanes.cuh"
#include "../device/launch.cuh"
#include "../gemm/tensor.cuh"
#include "args.h"

namespace moecomm {

// Registers of a thread of the loader warpgroup, whose other warps communicate, and of a math warpgroup.
struct RoleRegisters {
    i32 link, product;
};
constexpr RoleRegisters kRoleRegisters{72, 216};
// In an all-to-all whose operand A is x (gemm/scaled_rows.cuh): communicating warps add nothing up, and tiles have two kinds of places.
constexpr RoleRegisters kRowsCopyRegisters{56, 224};
MOECOMM_BOTH constexpr bool fits(const RoleRegisters& r) { return (r.link + kMathGroups * r.product) * kWarpgroup <= 65536; }
static_assert(fits(kRoleRegisters) && fits(kRowsCopyRegisters), "registers of a multiprocessor");

// Begins a kernel of a product. All threads of all blocks; one thread calls init(), which initializes barriers. On return earlier kernels
// have ended, and the barriers of all blocks of the cluster are initialized.
template <i32 cluster, class Init>
MOECOMM_FN void begin_product(const GemmArgs& args, const Init& init) {
    if (threadIdx.x == 0) {
        prefetch_map(args.w);
        for (const TensorMap& map : args.x) prefetch_map(map);
        init();
        barrier_init_done();
    }
    await_earlier_kernels();
    launch_dependents();
    sync_cluster<cluster>();
}

// One round of a rank, for one thread.
struct OverlapRound {
    const Overlap& o;
    u64 number;

    // Any thread, after await_earlier_kernels(). No block has ended the round yet, because this one has not.
    MOECOMM_FN explicit OverlapRound(const Overlap& overlap) : o(overlap), number(load_relaxed(&state()->round) + 1) {}

    MOECOMM_FN OverlapState* state() const { return local<OverlapState>(o.state); }
    // As of Window.
    template <class T>
    MOECOMM_FN T* peer(i32 of, u64 offset) const {
        return reinterpret_cast<T*>(o.peers[of] + offset);
    }
    template <class T>
    MOECOMM_FN T* local(u64 offset) const {
        return peer<T>(rank(), offset);
    }
    MOECOMM_FN i32 rank() const { return o.window.rank; }
    MOECOMM_FN i32 half() const { return static_cast<i32>(number % 2); }
    MOECOMM_FN u64 flags_at() const { return o.flags + static_cast<u64>(half()) * kFlags * sizeof(u64); }
    MOECOMM_FN u64* flag(i32 of, i32 index) const { return peer<u64>(of, flags_at()) + index; }
    // Address of this round's staging on a rank.
    MOECOMM_FN u64 staging(i32 of) const { return o.peers[of] + o.staging[half()]; }
    MOECOMM_FN u64 packets(i32 of) const { return o.peers[of] + o.packets[half()]; }

    // Takes the next item of a counter. A whole warp; relaxed.
    MOECOMM_FN i32 take(i32 counter) const {
        i32 item = 0;
        if (lane_id() == 0) item = static_cast<i32>(atomicAdd(&state()->counters[counter], 1u));
        return __shfl_sync(kAllLanes, item, 0);
    }

    // Waits for `count` flags of this rank: flag(i) is the i-th word, from(i) the rank that raises it. A whole warp; acquire, for all
    // lanes. On failure, returns false and ends the other waits of this rank; end() reports.
    template <class Flag, class From>
    MOECOMM_FN bool await(i32 count, const Flag& flag, const From& from) const {
        for (i32 base = 0; base < count; base += kWarp) {
            const i32 i = min(base + lane_id(), count - 1);
            const bool in_time = await_flag(flag(i), from(i), i);
            if (!__all_sync(kAllLanes, in_time)) return false;
        }
        __syncwarp();  // what a lane has acquired is visible to all of them
        return true;
    }

    // True if all of these flags have come already. As await().
    template <class Flag>
    MOECOMM_FN bool have(i32 count, const Flag& flag) const {
        for (i32 base = 0; base < count; base += kWarp)
            if (!__all_sync(kAllLanes, load_acquire(flag(min(base + lane_id(), count - 1))) >= number)) return false;
        __syncwarp();
        return true;
    }

    // Ends the round. All threads of all blocks, in converged warps. The last block reports what has failed: by its last warp, which
    // belongs to a math warpgroup where there is one, and so has the registers for a call.
    MOECOMM_FN void end() const {
        if (!last_block(&state()->ended) || threadIdx.x / kWarp != blockDim.x / kWarp - 1) return;
        if (lane_id() < kCounters) state()->counters[lane_id()] = 0;
        if (lane_id() != 0) return;
        store_relaxed(&state()->round, number);
        if (load_relaxed(control<const u32>(o.window.abort)) == 0) return;
        o.window.report(o.window, 0, Phase::signal, state()->which, number, state()->seen, state()->waited_ns);
    }

    MOECOMM_FN Deadline deadline() const {
        return {o.window.timeout_ns, control<const u32>(o.window.abort), reinterpret_cast<const u32*>(o.window.abort_host)};
    }
    // Notes a failed wait for `from`, and ends the other waits of this rank; end() reports. One thread. `waited` ok: the rank has left.
    MOECOMM_FN void fail(Waited waited, i32 from, i32 which, u64 seen) const {
        const u32 cause = abort_word(waited == Waited::ok ? Failure::peer_lost : Failure::timeout, from);
        if (waited == Waited::aborted || compare_exchange(control<u32>(o.window.abort), 0, cause) != 0) return;
        state()->which = which;
        state()->seen = seen;
        state()->waited_ns = waited == Waited::timeout ? o.window.timeout_ns : 0;
    }

  private:
    // A word of the Window's own memory, which a Window with adopted memory has elsewhere.
    template <class T>
    MOECOMM_FN T* control(u64 offset) const {
        return reinterpret_cast<T*>(o.control + offset);
    }
    // One lane's part of await(). Polls are acquiring loads, so that nothing is loaded after the flag has come: each load takes 0.7 us.
    // They invalidate L1, through which these kernels load nothing twice.
    MOECOMM_FN bool await_flag(const u64* word, i32 from, i32 which) const {
        const u32* const gone = control<const u32>(o.window.left_at(from));
        const Deadline limit = deadline();
        bool come = false;
        const Waited waited = wait_until(limit, [&] {
            const u32 left = load_relaxed(gone);
            come = load_acquire(word) >= number;
            return come || left != 0;
        });
        if (come) return true;
        static_cast<void>(load_acquire(gone));  // before the word: what the rank stored before it left is there
        const u64 seen = load_acquire(word);
        if (seen >= number) return true;
        fail(waited, from, which, seen);
        return false;
    }
};

}  // namespace moecomm
