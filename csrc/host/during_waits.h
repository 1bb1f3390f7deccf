// A callback that the calling thread of a round runs periodically while it waits, so that Python's main thread can run signal handlers.
#pragma once
#include <functional>

#include "../protocol/compiler.h"

namespace moecomm::host {

// Time between two callbacks.  A shorter wait makes none.
constexpr u64 kLookNs = 20'000'000;

// While this object lives, waits of the thread that made it call `look`, which must not throw.
class DuringWaits {
  public:
    explicit DuringWaits(std::function<void()> look);
    ~DuringWaits();
    DuringWaits(const DuringWaits&) = delete;
    DuringWaits& operator=(const DuringWaits&) = delete;

    // True if this thread has a callback.
    static bool any();
    // Run this thread's callback, if it has one and kLookNs have passed since the last.
    static void look();

  private:
    const std::function<void()> look_;
    DuringWaits* const outer_;  // that of an outer call, whose signal handler makes this call
    u64 last_ns_ = 0;           // time of the last callback; 0: look() has not been called yet
};

}  // namespace moecomm::host
