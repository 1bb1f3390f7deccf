// Memory orders, spelled alike for both executors. "System" scope reaches every rank that maps the window.
//
// Publication rule: write the payload with ordinary stores, then store_release a flag. The reader load_acquires the flag, then reads the
// payload with ordinary loads. Nothing in a window is read before the flag that covers it.
//
// Every function is called by one thread and cannot fail; its name states its order, and its scope is the system.
#pragma once
#include "compiler.h"

namespace moecomm {

#if MOECOMM_DEVICE

MOECOMM_FN u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MOECOMM_FN u64 load_acquire(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
MOECOMM_FN u32 load_relaxed(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MOECOMM_FN u64 load_relaxed(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
MOECOMM_FN void store_release(u32* p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
MOECOMM_FN void store_release(u64* p, u64 v) { asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
MOECOMM_FN void store_relaxed(u32* p, u32 v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
MOECOMM_FN void store_relaxed(u64* p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
// Sets *p to v if it holds `expected`; returns what it held.
MOECOMM_FN u32 compare_exchange(u32* p, u32 expected, u32 v) {
    u32 old;
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(v) : "memory");
    return old;
}
MOECOMM_FN void add_release(u64* p, u64 v) { asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
MOECOMM_FN void add_relaxed(u64* p, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
MOECOMM_FN void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

#else

inline u32 load_acquire(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 load_acquire(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u32 load_relaxed(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u64 load_relaxed(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void store_release(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_release(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_relaxed(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline u32 compare_exchange(u32* p, u32 expected, u32 v) {
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
inline void add_release(u64* p, u64 v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
inline void add_relaxed(u64* p, u64 v) { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline void fence_system() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

#endif

}  // namespace moecomm
