// Signal handlers of Python's main thread: the calling thread of a round runs a callback periodically while it waits; other threads take no
// signal.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <functional>
#include <thread>
#include <utility>

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

// A thread with all POSIX signals blocked: they must interrupt the waits of Python's main thread.
template <class Run>
std::thread background_thread(Run run) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread inherits the mask
    struct Restore {
        const sigset_t* mask;
        ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
    } restore{&before};
    return std::thread(std::move(run));
}

}  // namespace moecomm::host
