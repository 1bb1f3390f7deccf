// Windows between CPU ranks, in plain C++17: docs/windows.md. A program that includes it links nothing of moecomm. Signal handlers of
// Python run when such a program returns.
#pragma once
#include "../../window/pace.h"
#include "../../window/window.h"

namespace moecomm {

inline u64 now_ns() { return monotonic_ns(); }
inline void back_off(u32 tries) {
    pace(tries, [] {});
}

}  // namespace moecomm
