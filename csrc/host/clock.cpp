#include <sched.h>
#include <time.h>

#include "../protocol/deadline.h"
#include "during_waits.h"

namespace moecomm {

namespace {

constexpr u32 kSpins = 64;         // about a microsecond, within which a peer on another core answers
constexpr u32 kYields = 512;       // then hand the core to a rank that has work
constexpr i64 kFirstSleep = 5000;  // ns; Linux adds its timer slack
constexpr i64 kLongestSleep = 200000;

void spin_once() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

u64 now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<u64>(t.tv_sec) * 1000000000ull + static_cast<u64>(t.tv_nsec);
}

void back_off(u32 tries) {
    if (tries <= kSpins) return spin_once();
    if (tries <= kSpins + kYields) {
        sched_yield();
        return;
    }
    host::DuringWaits::look();
    const i64 longer = kFirstSleep * static_cast<i64>(tries - kSpins - kYields);
    const timespec pause{0, longer < kLongestSleep ? longer : kLongestSleep};
    nanosleep(&pause, nullptr);
}

}  // namespace moecomm
