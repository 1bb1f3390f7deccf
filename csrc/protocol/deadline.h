// The only loop of moecomm that may spin.  Every wait ends: the condition holds, the deadline has passed, or somebody set an abort word.
#pragma once
#include "order.h"

namespace moecomm {

#if MOECOMM_DEVICE
MOECOMM_FN u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
#else
u64 now_ns();              // CLOCK_MONOTONIC; csrc/host/clock.cpp
void back_off(u32 tries);  // spins, then yields, then sleeps: ranks may outnumber cores
#endif

enum class Waited : u32 { ok = 0, timeout = 1, aborted = 2 };

struct Deadline {
    u64 timeout_ns;
    const u32* abort_here;  // in our window: set by peers and by ourselves
    const u32* abort_host;  // in memory that the host writes: set by the watcher and by Buffer.abort(); may equal abort_here
};

// Polls `ready()` until it is true.  Time is looked at every 64 polls on a GPU: globaltimer and the host's word are slow to read.
template <class Ready>
MOECOMM_FN Waited wait_until(const Deadline& d, Ready ready) {
    if (ready()) return Waited::ok;
    const u64 start = now_ns();
    for (u32 tries = 1;; ++tries) {
        if (ready()) return Waited::ok;
#if MOECOMM_DEVICE
        if (tries % 64 != 0) continue;
#else
        back_off(tries);
#endif
        if (load_relaxed(d.abort_here) != 0 || load_relaxed(d.abort_host) != 0) return Waited::aborted;
        if (now_ns() - start > d.timeout_ns) return Waited::timeout;
    }
}

}  // namespace moecomm
