// The NVSHMEM functions of shims.h.  The network code is in the wheel's libnvshmem_device.a, which is linked in too; the state that both
// read is set when the kernel has been loaded (moecomm/gpu/linking.py).
#include <nvshmem.h>
#include <nvshmemx.h>

#include "shims.h"

#if NVSHMEM_VENDOR_MAJOR_VERSION * 100 + NVSHMEM_VENDOR_MINOR_VERSION < 304
#error "The nvshmem shim wants NVSHMEM 3.4.5 or later"
#endif
#ifndef NDEBUG
#error "The nvshmem shim wants NDEBUG: no kernel traps"
#endif

namespace moecomm {
namespace {

static_assert(sizeof(uint64_t) == sizeof(u64), "signals are words of 64 bits");
__device__ __forceinline__ uint64_t* word(u64* signal) { return reinterpret_cast<uint64_t*>(signal); }
__device__ __forceinline__ uint64_t* word(const u64* signal) { return word(const_cast<u64*>(signal)); }  // NVSHMEM only reads it

}  // namespace

extern "C" {

__device__ void* moecomm_nvshmem_ptr(const void* local, i32 peer) { return nvshmem_ptr(local, peer); }

__device__ void moecomm_nvshmem_put(void* to, const void* from, u64 bytes, i32 peer) { nvshmem_putmem_nbi(to, from, bytes, peer); }
__device__ void moecomm_nvshmem_put_warp(void* to, const void* from, u64 bytes, i32 peer) {
    nvshmemx_putmem_nbi_warp(to, from, bytes, peer);
}

__device__ void moecomm_nvshmem_put_signal_add(void* to, const void* from, u64 bytes, u64* signal, u64 add, i32 peer) {
    nvshmem_putmem_signal_nbi(to, from, bytes, word(signal), add, NVSHMEM_SIGNAL_ADD, peer);
}
__device__ void moecomm_nvshmem_put_signal_add_warp(void* to, const void* from, u64 bytes, u64* signal, u64 add, i32 peer) {
    nvshmemx_putmem_signal_nbi_warp(to, from, bytes, word(signal), add, NVSHMEM_SIGNAL_ADD, peer);
}
__device__ void moecomm_nvshmem_put_signal_set(void* to, const void* from, u64 bytes, u64* signal, u64 value, i32 peer) {
    nvshmem_putmem_signal_nbi(to, from, bytes, word(signal), value, NVSHMEM_SIGNAL_SET, peer);
}
__device__ void moecomm_nvshmem_put_signal_set_warp(void* to, const void* from, u64 bytes, u64* signal, u64 value, i32 peer) {
    nvshmemx_putmem_signal_nbi_warp(to, from, bytes, word(signal), value, NVSHMEM_SIGNAL_SET, peer);
}

__device__ void moecomm_nvshmem_put_value(u64* to, u64 value, i32 peer) { nvshmem_uint64_p(word(to), value, peer); }

__device__ void moecomm_nvshmem_signal_add(u64* signal, u64 add, i32 peer) {
    nvshmemx_signal_op(word(signal), add, NVSHMEM_SIGNAL_ADD, peer);
}
__device__ void moecomm_nvshmem_signal_set(u64* signal, u64 value, i32 peer) {
    nvshmemx_signal_op(word(signal), value, NVSHMEM_SIGNAL_SET, peer);
}

__device__ u64 moecomm_nvshmem_read_signal(const u64* signal) { return nvshmem_signal_fetch(word(signal)); }
__device__ i32 moecomm_nvshmem_acquire_signal(const u64* signal, u64 least) {
    return nvshmem_uint64_test(word(signal), NVSHMEM_CMP_GE, least);
}
__device__ void moecomm_nvshmem_reset_signal(u64* signal) { *static_cast<volatile u64*>(signal) = 0; }

__device__ void moecomm_nvshmem_get(void* to, const void* from, u64 bytes, i32 peer) { nvshmem_getmem_nbi(to, from, bytes, peer); }
__device__ void moecomm_nvshmem_get_warp(void* to, const void* from, u64 bytes, i32 peer) {
    nvshmemx_getmem_nbi_warp(to, from, bytes, peer);
}

__device__ void moecomm_nvshmem_fence() { nvshmem_quiet(); }
__device__ void moecomm_nvshmem_quiet() { nvshmem_quiet(); }
__device__ void moecomm_nvshmem_quiet_warp() {
    nvshmemi_quiet<NVSHMEMI_THREADGROUP_WARP>();  // the public API has only the single-thread form
}

}  // extern "C"
}  // namespace moecomm
