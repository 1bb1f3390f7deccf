// What the calling thread of a round does now and then while it waits: Python's main thread runs the handlers of signals.
#pragma once
#include <functional>

#include "../protocol/compiler.h"

namespace moecomm::host {

// How long a wait may go on between two looks.  No shorter wait looks even once.
constexpr u64 kLookNs = 20'000'000;

// From here to its end the waits of this thread call `look`, which must not throw.
class DuringWaits {
  public:
    explicit DuringWaits(std::function<void()> look);
    ~DuringWaits();
    DuringWaits(const DuringWaits&) = delete;
    DuringWaits& operator=(const DuringWaits&) = delete;

    // Does this thread have something to call?
    static bool any();
    // Calls it if it has, and kLookNs have passed.
    static void look();

  private:
    const std::function<void()> look_;
    DuringWaits* const outer_;  // of a call whose handler makes this one
    u64 last_ns_ = 0;           // 0: it has not waited long yet
};

}  // namespace moecomm::host
