// Spans of warp roles, in kernels that are compiled with MOECOMM_TRACE (moecomm/gpu/span_ring.py). In all others MOECOMM_SPAN is nothing,
// and there is no ring: the compiler sees the text of a kernel without spans.
#pragma once

#ifdef MOECOMM_TRACE

#include "wait.cuh"

// A ring in host memory, which kernels fill and the host reads without a wait. The host sets it when it has loaded the module.
struct MoecommSpanRing {
    unsigned long long records;  // MoecommSpan[mask + 1]; 0: nobody reads, so nothing is written
    unsigned long long next;     // u32 in device memory: number of the next record
    unsigned int mask, pad;
};
extern "C" {
__device__ MoecommSpanRing moecomm_span_ring;
}

namespace moecomm {

// Roles of warps, and parts of kernels. moecomm/observe/tracing/files.py has their names, in this order.
enum class Role : u32 {
    kernel,
    agree,
    send,
    receive,
    metadata,
    flags,
    put,
    forward,
    unpack,
    push,
    reduce,
    pull,
    return_forward,
    drain,
    publish,
    fetch,
    await_rows,
    await_tiles,
    gemm_1,
    gemm_2,
    send_results,
    await_results,
};

// A span of one thread, from construction to destruction. Nothing is ordered, and nothing waits: a record is two stores to host memory.
//
// A record has 32 bytes, in two halves that arrive whole: u64 begin_ns, u32 number, u32 round; u32 duration in ns, u32 number, u32 owner,
// u8 role, u24 block. The number, from 1 on, tells the host that the half is there. The owner names this rank's failure record.
class RoleSpan {
  public:
    // `records`: true in one thread of the role. `tag` is read at the end; it may not be known before. Null: that of a fused layer.
    MOECOMM_FN RoleSpan(Role role, const Context& ctx, const u32* tag, bool records)
        : role_(role),
          ctx_(ctx),
          tag_(tag),
          records_(records),
          early_(records && role == Role::publish ? next_tag(ctx) : 0),
          begin_ns_(records ? now_ns() : 0) {}
    MOECOMM_FN ~RoleSpan() {
        if (!records_ || moecomm_span_ring.records == 0) return;
        const u64 end_ns = now_ns(), lasted_ns = end_ns - begin_ns_;
        const u32 before = atomicAdd(reinterpret_cast<u32*>(moecomm_span_ring.next), 1u), number = before + 1;
        auto* const to = reinterpret_cast<volatile u64*>(moecomm_span_ring.records) + static_cast<u64>(before & moecomm_span_ring.mask) * 4;
        const u32 lasted = lasted_ns < 0xffffffffu ? static_cast<u32>(lasted_ns) : 0xffffffffu;
        store_pair(to, begin_ns_, number | static_cast<u64>(round_number(tag())) << 32);
        store_pair(to + 2, lasted | static_cast<u64>(number) << 32,
                   static_cast<u32>(ctx_.record / sizeof(FailureRecord)) |
                       static_cast<u64>(static_cast<u32>(role_) | static_cast<u32>(blockIdx.x) << 8) << 32);
    }
    RoleSpan(const RoleSpan&) = delete;

  private:
    MOECOMM_FN u32 tag() const {
        if (tag_ != nullptr) return *tag_;
        return role_ == Role::publish ? early_ : load_relaxed(&own_state(ctx_)->last_dispatch);
    }
    // The dispatch of a layer comes after the kernel that publishes, and may begin while that runs.
    MOECOMM_FN static u32 next_tag(const Context& ctx) { return round_tag(load_relaxed(&own_state(ctx)->round) + 1); }
    MOECOMM_FN static void store_pair(volatile u64* to, u64 first, u64 second) {
        asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
    }

    const Role role_;
    const Context& ctx_;
    const u32* const tag_;
    const bool records_;
    const u32 early_;
    const u64 begin_ns_;
};

}  // namespace moecomm

// A span of the rest of the scope.
#define MOECOMM_SPAN(role, round, records) const RoleSpan span_of_##role(Role::role, (round).ctx, &(round).tag, records)
#define MOECOMM_LAYER_SPAN(role, context, records) const RoleSpan span_of_##role(Role::role, context, nullptr, records)

#else
#define MOECOMM_SPAN(role, round, records)
#define MOECOMM_LAYER_SPAN(role, context, records)
#endif
