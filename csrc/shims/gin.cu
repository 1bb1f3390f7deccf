// The NCCL GIN functions of shims.h.  Compiled twice (build.py): for all GIN backends, selected at run time by the communicator, and for
// the proxy alone, which makes kernels about a third as large.  NDEBUG is required because DOCA's headers otherwise contain a trap.
#include <nccl.h>
#include <nccl_device.h>

#include "shims.h"

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 30, 7)
#error "The gin shim wants NCCL 2.30.7 or later"
#endif
#ifndef NDEBUG
#error "The gin shim wants NDEBUG: no kernel traps"
#endif

namespace moecomm {
namespace {

using Warp = ncclCoopWarp;
using Thread = ncclCoopThread;

__device__ __forceinline__ const ncclDevComm& comm_of(const void* comm) { return *static_cast<const ncclDevComm*>(comm); }
__device__ __forceinline__ ncclWindow_t window_of(const void* window) {
    return static_cast<ncclWindow_t>(const_cast<void*>(window));  // NCCL's handle points to memory that it never writes
}

template <class Coop, class Action>
__device__ __forceinline__ void put(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                    u64 from, u64 bytes, Action action) {
    const ncclDevComm& c = comm_of(comm);
    const ncclGin gin(c, static_cast<int>(context));
    gin.put(ncclTeamWorld(c), peer, window_of(to_window), to, window_of(from_window), from, bytes, action, ncclGin_None{}, Coop{});
}
template <class Action>
__device__ __forceinline__ void signal(const void* comm, u32 context, i32 peer, Action action) {
    const ncclDevComm& c = comm_of(comm);
    ncclGin(c, static_cast<int>(context)).signal(ncclTeamWorld(c), peer, action);
}
template <class Coop>
__device__ __forceinline__ void get(const void* comm, u32 context, i32 peer, const void* from_window, u64 from, const void* to_window,
                                    u64 to, u64 bytes) {
    const ncclDevComm& c = comm_of(comm);
    ncclGin(c, static_cast<int>(context))
        .get(ncclTeamWorld(c), peer, window_of(from_window), from, window_of(to_window), to, bytes, Coop{});
}

__device__ __forceinline__ ncclGin_StrongSignalAdd onto(u32 signal, u64 add) { return {signal, add}; }
__device__ __forceinline__ ncclGin_StrongVASignalAdd onto(const void* window, u64 offset, u64 add) {
    return {window_of(window), offset, add};
}

// Queue entries to require for `posts`, each of which may take two; at most the whole queue, else no post could ever start.
__host__ __device__ constexpr u64 wanted_entries(u32 posts, u64 queue) { return 2ull * posts < queue ? 2ull * posts : queue; }
static_assert(wanted_entries(3, 256) == 6 && wanted_entries(128, 256) == 256 && wanted_entries(200, 256) == 256);

// Single polls of conditions for which gin.h offers only waits; they read the words that NCCL's own waits poll.
template <ncclNetDeviceType backend>
struct Look;

#if NCCL_GIN_PROXY_ENABLE
template <>
struct Look<NCCL_NET_DEVICE_GIN_PROXY> {
    __device__ static ncclGinProxyGpuCtx_t* of(ncclGinCtx ctx) { return static_cast<ncclGinProxyGpuCtx_t*>(ctx.handle) + ctx.contextId; }
    __device__ static u32 consumed(ncclGinProxyGpuCtx_t* proxy, int peer) {
        const cuda::atomic_ref<u32, cuda::thread_scope_system> ci(proxy->cis[peer]);
        return ci.load(cuda::memory_order_acquire);
    }
    // gin_proxy.h:46-57
    __device__ static i32 ended(ncclGinCtx ctx, const ncclGinRequest_t& request) {
        const auto& r = reinterpret_cast<const ncclGinCpuProxyRequest&>(request);
        return nccl::utility::rollingLessEq<u32>(r.nextGfdIdx, consumed(of(ctx), r.peer)) ? 1 : 0;
    }
    // gin_proxy.h:77-81; a put with a flag in a window is two entries (262-270)
    __device__ static i32 room(ncclGinCtx ctx, int peer, u32 posts) {
        ncclGinProxyGpuCtx_t* proxy = of(ctx);
        const u32 behind = consumed(proxy, peer);  // read first: posts in between then make the result too small, never too large
        const cuda::atomic_ref<u32, cuda::thread_scope_system> pi(proxy->pis[peer]);
        return pi.load(cuda::memory_order_relaxed) - behind + wanted_entries(posts, proxy->queueSize) <= proxy->queueSize ? 1 : 0;
    }
};
#endif

#if NCCL_GIN_GDAKI_ENABLE
template <>
struct Look<NCCL_NET_DEVICE_GIN_GDAKI> {
    __device__ static doca_gpu_dev_verbs_qp* queue(ncclGinCtx ctx, int peer) {
        return (static_cast<ncclGinGdakiGPUContext*>(ctx.handle) + ctx.contextId)->gdqp + peer;
    }
    // NCCL 2.32 polls a queue pair, 2.30 its completion queue.
    template <class Queue>
    __device__ static auto poll(Queue* qp, u64 entry, int)
        -> decltype(doca_gpu_dev_verbs_poll_one_cq_at<DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_GPU>(qp, entry)) {
        return doca_gpu_dev_verbs_poll_one_cq_at<DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_GPU>(qp, entry);
    }
    template <class Queue>
    __device__ static int poll(Queue* qp, u64 entry, long) {
        return doca_gpu_dev_verbs_poll_one_cq_at<DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_GPU>(&qp->cq_sq, entry);
    }
    __device__ static i32 look(doca_gpu_dev_verbs_qp* qp, u64 entry) {
        const int status = poll(qp, entry, 0);
        return status == 0 ? 1 : status < 0 ? -1 : 0;
    }
    // gin_gdaki.h:333-352
    __device__ static i32 ended(ncclGinCtx ctx, const ncclGinRequest_t& request) {
        const auto& r = reinterpret_cast<const ncclGinGdakiRequest&>(request);
        return r.sq_rsvd_index == 0 ? 1 : look(queue(ctx, r.peer), r.sq_rsvd_index - 1);
    }
    // doca_gpunetio_dev_verbs_qp.cuh:76-103; a put with a signal is two entries
    __device__ static i32 room(ncclGinCtx ctx, int peer, u32 posts) {
        doca_gpu_dev_verbs_qp* qp = queue(ctx, peer);
        const u64 entries = qp->sq_wqe_num;
        const u64 last = doca_gpu_dev_verbs_atomic_read<uint64_t, DOCA_GPUNETIO_VERBS_RESOURCE_SHARING_MODE_GPU>(&qp->sq_rsvd_index) +
                         wanted_entries(posts, entries) - 1;
        return last < entries ? 1 : look(qp, last - entries);
    }
};
#endif

#if NCCL_GIN_GPI_ENABLE
template <>
struct Look<NCCL_NET_DEVICE_GIN_GPI> {
    // gin_gpi.h:744-755
    __device__ static i32 ended(ncclGinCtx, const ncclGinRequest_t& request) {
        const auto& r = reinterpret_cast<const ncclGinGpiRequest&>(request);
        if (GPI_READ_ONCE(*r.flushCounterPtr) <= r.waitValue) return 0;
        cuda::atomic_thread_fence(cuda::memory_order_acquire, cuda::thread_scope_system);
        return 1;
    }
    // gin_gpi.h:93-111: one queue for all peers
    __device__ static i32 room(ncclGinCtx ctx, int, u32 posts) {
        gpi_gpu_channel_t* channel = nccl::gin::gpi::gpi_gpu_channel_get_ptr(ctx);
        const u64 behind = GPI_READ_ONCE(channel->queue_.ci_->value);
        const u64 ahead = GPI_READ_ONCE(channel->queue_.pi_);
        const u64 entries = 1ull << channel->queue_.log_depth;
        return ahead - behind + wanted_entries(posts, entries) <= entries ? 1 : 0;
    }
};
#endif

template <ncclNetDeviceType backend>
struct Ended {
    __device__ static i32 call(ncclGinCtx ctx, const ncclGinRequest_t& request) { return Look<backend>::ended(ctx, request); }
};
template <ncclNetDeviceType backend>
struct Room {
    __device__ static i32 call(ncclGinCtx ctx, int peer, u32 posts) { return Look<backend>::room(ctx, peer, posts); }
};

}  // namespace

extern "C" {

__device__ void* moecomm_gin_peer_ptr(const void* comm, const void* window, u64 offset, i32 peer) {
    const ncclDevComm& c = comm_of(comm);
    if (!ncclTeamRankIsMember(ncclTeamLsa(c), ncclTeamWorld(c), peer)) return nullptr;
    return ncclGetPeerPointer(window_of(window), offset, peer);
}

__device__ u32 moecomm_gin_contexts(const void* comm) { return comm_of(comm).ginContextCount; }

__device__ void moecomm_gin_put(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window, u64 from,
                                u64 bytes) {
    put<Thread>(comm, context, peer, to_window, to, from_window, from, bytes, ncclGin_None{});
}
__device__ void moecomm_gin_put_warp(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                     u64 from, u64 bytes) {
    put<Warp>(comm, context, peer, to_window, to, from_window, from, bytes, ncclGin_None{});
}
__device__ void moecomm_gin_put_signal(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                       u64 from, u64 bytes, u32 signal, u64 add) {
    put<Thread>(comm, context, peer, to_window, to, from_window, from, bytes, onto(signal, add));
}
__device__ void moecomm_gin_put_signal_warp(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                            u64 from, u64 bytes, u32 signal, u64 add) {
    put<Warp>(comm, context, peer, to_window, to, from_window, from, bytes, onto(signal, add));
}
__device__ void moecomm_gin_put_flag(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                     u64 from, u64 bytes, const void* flag_window, u64 flag, u64 add) {
    put<Thread>(comm, context, peer, to_window, to, from_window, from, bytes, onto(flag_window, flag, add));
}
__device__ void moecomm_gin_put_flag_warp(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, const void* from_window,
                                          u64 from, u64 bytes, const void* flag_window, u64 flag, u64 add) {
    put<Warp>(comm, context, peer, to_window, to, from_window, from, bytes, onto(flag_window, flag, add));
}

__device__ void moecomm_gin_put_value(const void* comm, u32 context, i32 peer, const void* to_window, u64 to, u64 value) {
    const ncclDevComm& c = comm_of(comm);
    ncclGin(c, static_cast<int>(context)).putValue(ncclTeamWorld(c), peer, window_of(to_window), to, value);
}

__device__ void moecomm_gin_signal(const void* comm, u32 context, i32 peer, u32 id, u64 add) { signal(comm, context, peer, onto(id, add)); }
__device__ void moecomm_gin_flag(const void* comm, u32 context, i32 peer, const void* flag_window, u64 flag, u64 add) {
    signal(comm, context, peer, onto(flag_window, flag, add));
}

__device__ u64 moecomm_gin_read_signal(const void* comm, u32 context, u32 signal) {
    return ncclGin(comm_of(comm), static_cast<int>(context)).readSignal(signal);
}
__device__ void moecomm_gin_reset_signal(const void* comm, u32 context, u32 signal) {
    ncclGin(comm_of(comm), static_cast<int>(context)).resetSignal(signal);
}

__device__ void moecomm_gin_get(const void* comm, u32 context, i32 peer, const void* from_window, u64 from, const void* to_window, u64 to,
                                u64 bytes) {
    get<Thread>(comm, context, peer, from_window, from, to_window, to, bytes);
}
__device__ void moecomm_gin_get_warp(const void* comm, u32 context, i32 peer, const void* from_window, u64 from, const void* to_window,
                                     u64 to, u64 bytes) {
    get<Warp>(comm, context, peer, from_window, from, to_window, to, bytes);
}

__device__ void moecomm_gin_flush(const void* comm, u32 context) { ncclGin(comm_of(comm), static_cast<int>(context)).flush(Thread{}); }
__device__ void moecomm_gin_flush_warp(const void* comm, u32 context) { ncclGin(comm_of(comm), static_cast<int>(context)).flush(Warp{}); }

__device__ void moecomm_gin_flush_begin(const void* comm, u32 context, i32 peer, u64* ticket) {
    const ncclDevComm& c = comm_of(comm);
    ncclGinRequest_t request{};
    ncclGin(c, static_cast<int>(context)).flushAsync(ncclTeamWorld(c), static_cast<u32>(peer), &request);
    static_assert(sizeof request == 2 * sizeof(u64), "shims.h promises two words");
    ticket[0] = request.opaque[0];
    ticket[1] = request.opaque[1];
}
__device__ i32 moecomm_gin_flush_ended(const void* comm, u32 context, const u64* ticket) {
    const ncclGin gin(comm_of(comm), static_cast<int>(context));
    const ncclGinRequest_t request{{ticket[0], ticket[1]}};
    return ncclGinCall<Ended>(gin._makeCtx(), request);
}
__device__ i32 moecomm_gin_has_room(const void* comm, u32 context, i32 peer, u32 posts) {
    const ncclDevComm& c = comm_of(comm);
    const ncclGin gin(c, static_cast<int>(context));
    return ncclGinCall<Room>(gin._makeCtx(), nccl::gin::internal::teamRankToGinRank(c, ncclTeamWorld(c), peer), posts);
}

}  // extern "C"
}  // namespace moecomm
