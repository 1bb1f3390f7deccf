// Windows in programs of CPU ranks, which link nothing of moecomm: the clock of their waits. Signal handlers of Python run when such a
// program returns.
#pragma once
#include "pace.h"
#include "window.h"

namespace moecomm {

inline u64 now_ns() { return monotonic_ns(); }
inline void back_off(u32 tries) {
    pace(tries, [] {});
}

}  // namespace moecomm
