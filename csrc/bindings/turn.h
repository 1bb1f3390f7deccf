// Turn: which threads are in the calls of an object, and how many of its calls have failed before they reached the other ranks.
#pragma once
#include <Python.h>

#include <algorithm>
#include <vector>

#include "../protocol/compiler.h"

namespace moecomm::bindings {

// Used under the GIL.  Nothing here runs code of Python, so no signal handler comes between two steps.
class Turn {
  public:
    // shared: several threads may be in calls at once; else one, which may have the turn several times.
    explicit Turn(bool shared = false) : shared(shared) {}

    // Take the turn for this thread; false: another thread has it.
    bool take() { return (shared || !others()) && (threads_.push_back(PyThread_get_thread_ident()), true); }
    // Take the turn for this thread; false: another thread is in a call, or has the turn.
    bool take_alone() { return !others() && take(); }
    // Give back what take() took in a thread, from any thread.
    void give_back(unsigned long thread) {
        const auto last = std::find(threads_.rbegin(), threads_.rend(), thread);
        if (last != threads_.rend()) threads_.erase(std::next(last).base());
    }
    // True if no other call than one that is about to end can be under way.  `outer`: that call consists of others.
    bool ends(bool outer) const { return shared ? threads_.size() == 1 : !outer; }

    const bool shared;
    i64 running = 0;       // calls under way that contain no other; at most one unless the turn is shared
    bool closing = false;  // the object closes when they end
    bool several = false;  // the call under way makes rounds whose number is not known ahead, and is yet to make the last
    i64 depth = 0;         // calls under way that consist of others; of a shared turn at most one
    i64 made = 0;          // rounds
    i64 failed = 0;        // calls that failed before their last round, and are counted
    i64 uncounted = 0;     // calls that were refused, or have failed so and are yet to be counted

  private:
    bool others() const {
        const unsigned long thread = PyThread_get_thread_ident();
        return std::any_of(threads_.begin(), threads_.end(), [=](unsigned long one) { return one != thread; });
    }

    std::vector<unsigned long> threads_;  // that have it, once for each time
};

}  // namespace moecomm::bindings
