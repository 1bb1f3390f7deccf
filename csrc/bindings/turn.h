// Turn: which thread is in the calls of an object, and how many of its calls have failed before they reached the other ranks.
#pragma once
#include <Python.h>

#include "../protocol/compiler.h"

namespace moecomm::bindings {

// Used under the GIL.  Nothing here runs code of Python, so no signal handler comes between two steps.
class Turn {
  public:
    // Take the turn for this thread, which may have it already; false: another thread has it.
    bool take() {
        const unsigned long thread = PyThread_get_thread_ident();
        if (taken_ > 0 && owner_ != thread) return false;
        owner_ = thread;
        ++taken_;
        return true;
    }
    // Give back what take() took, from any thread.
    void give_back() { --taken_; }

    bool running = false;  // a call that contains no other is under way
    bool closing = false;  // the object closes when that call ends
    i64 depth = 0;         // calls under way that consist of others
    i64 made = 0;          // rounds
    i64 failed = 0;        // calls that failed before their last round, and are counted
    i64 uncounted = 0;     // calls that were refused, or have failed so and are yet to be counted

  private:
    unsigned long owner_ = 0;  // the thread that has it
    i64 taken_ = 0;            // times
};

}  // namespace moecomm::bindings
