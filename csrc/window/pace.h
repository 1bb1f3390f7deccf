// Clock and pace of CPU waits: for the host executor (host/clock.cpp), and for programs that include moecomm/window.h.
#pragma once
#include <sched.h>
#include <time.h>

#include "../protocol/compiler.h"

namespace moecomm {

constexpr u32 kSpins = 64;         // about a microsecond, within which a peer on another core answers
constexpr u32 kYields = 512;       // then hand the core to a rank that has work
constexpr i64 kFirstSleep = 5000;  // ns; Linux adds its timer slack
constexpr i64 kLongestSleep = 200000;

inline u64 monotonic_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<u64>(t.tv_sec) * 1000000000ull + static_cast<u64>(t.tv_nsec);
}

inline void spin_once() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Let time pass between two polls. `tries`: polls so far. `before_sleep` is called before the thread sleeps.
template <class BeforeSleep>
void pace(u32 tries, BeforeSleep before_sleep) {
    if (tries <= kSpins) return spin_once();
    if (tries <= kSpins + kYields) {
        sched_yield();
        return;
    }
    before_sleep();
    const i64 longer = kFirstSleep * static_cast<i64>(tries - kSpins - kYields);
    const timespec pause{0, longer < kLongestSleep ? longer : kLongestSleep};
    nanosleep(&pause, nullptr);
}

}  // namespace moecomm
