// A thread with all POSIX signals blocked: they must interrupt the waits of Python's main thread.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace moecomm::host {

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
