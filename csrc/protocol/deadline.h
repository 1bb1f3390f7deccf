// Bounded waits. A wait ends when its condition holds, when the deadline has passed, or when an abort word is set.
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
void back_off(u32 tries);  // spins, then yields, then sleeps, because ranks may outnumber cores
#endif

enum class Waited : u32 { ok = 0, timeout = 1, aborted = 2 };

struct Deadline {
    u64 timeout_ns;
    const u32* abort_here;  // in this rank's window; set by peers and by this rank
    const u32* abort_host;  // in host-written memory; set by the watcher and by Buffer.abort(); may equal abort_here
};

#if MOECOMM_DEVICE

// SM cycles between two checks of the clock and the abort words, about 4 ms. globaltimer is one for the whole GPU, and its readers queue;
// the host's word is behind PCIe. Checked at the start of every wait and every 64 polls, they made a combine of 4096 tokens take 107 ms on
// 4 H200 instead of 0.6 ms.
constexpr u32 kCheckCycles = 1u << 23;

// Polls before a wait begins to nap between polls: short waits spin, long waits poll now and then.
constexpr u32 kEagerPolls = 64, kNapNs = 100;

MOECOMM_FN void nap() { asm volatile("nanosleep.u32 %0;" ::"n"(kNapNs)); }
MOECOMM_FN u32 cycles() {
    u32 c;
    asm volatile("mov.u32 %0, %clock;" : "=r"(c));
    return c;
}

// Paces the polls of one wait by one thread. Orders nothing: the caller's `ready()` acquires what it needs.
class Polls {
  public:
    MOECOMM_FN explicit Polls(const Deadline& d) : deadline_(&d), since_(cycles()) {}

    // Called after a failed poll. Returns ok to poll again, or the reason to give up.
    MOECOMM_FN Waited pause() {
        if (++polls_ > kEagerPolls) nap();
        if (cycles() - since_ < kCheckCycles) return Waited::ok;
        since_ = cycles();
        if (load_relaxed(deadline_->abort_here) != 0 || load_relaxed(deadline_->abort_host) != 0) return Waited::aborted;
        const u64 now = now_ns();
        if (start_ == 0) start_ = now;
        return now - start_ > deadline_->timeout_ns ? Waited::timeout : Waited::ok;
    }

  private:
    const Deadline* deadline_;
    u64 start_ = 0;
    u32 polls_ = 0, since_;
};

// One thread polls `ready()` until it is true. Orders nothing beyond what `ready` does. On timeout or abort returns the reason; the caller
// reports it.
template <class Ready>
MOECOMM_FN Waited wait_until(const Deadline& d, Ready ready) {
    for (Polls polls(d);;) {
        if (ready()) return Waited::ok;
        if (const Waited waited = polls.pause(); waited != Waited::ok) return waited;
    }
}

#else

class Polls {
  public:
    explicit Polls(const Deadline& d) : deadline_(&d), start_(now_ns()) {}

    Waited pause() {
        const Deadline& d = *deadline_;
        back_off(++tries_);
        if (load_relaxed(d.abort_here) != 0 || load_relaxed(d.abort_host) != 0) return Waited::aborted;
        return now_ns() - start_ > d.timeout_ns ? Waited::timeout : Waited::ok;
    }

  private:
    const Deadline* deadline_;
    u64 start_;
    u32 tries_ = 0;
};

// As on the device, but tries `ready()` before it reads the clock.
template <class Ready>
Waited wait_until(const Deadline& d, Ready ready) {
    if (ready()) return Waited::ok;
    for (Polls polls(d);;) {
        if (ready()) return Waited::ok;
        if (const Waited waited = polls.pause(); waited != Waited::ok) return waited;
    }
}

#endif

}  // namespace moecomm
