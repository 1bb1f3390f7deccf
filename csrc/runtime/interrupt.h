// Ctrl-C while a round holds Python's main thread.
//
// Python runs a signal's handler in the main thread only, when native code has returned; a round that waits for a stuck peer returns at
// its deadline.  But at once Python writes the signal's number to its wakeup descriptor.  While a round is armed that is a pipe of ours:
// a thread reads it and on SIGINT sets the abort words.  The round ends, and the handler raises KeyboardInterrupt.
// A round that nobody interrupts pays for two stores and one read of an empty pipe.
#pragma once
#include <mutex>
#include <vector>

#include "../protocol/compiler.h"
#include "descriptor.h"

namespace moecomm::runtime {

struct AbortWord {
    u64 address;  // u32*
    i32 rank;     // whose round it is; named as the culprit
};

class Interrupter {
  public:
    // That of this process; a forked child gets its own.  Not thread-safe: call it from Python's main thread.
    static Interrupter& instance();

    int wakeup_fd() const { return write_end_.get(); }
    // From now until disarm() SIGINT sets `words`.  Whatever is read goes on to `forward_to`, the wakeup descriptor of before, if any.
    void arm(std::vector<AbortWord> words, int forward_to);
    bool disarm();  // true if SIGINT came

  private:
    Interrupter();
    void watch();
    void read_signals();  // with mutex_ held

    Descriptor read_end_, write_end_;
    std::mutex mutex_;
    std::vector<AbortWord> words_;
    int forward_to_ = -1;
    bool interrupted_ = false;
};

}  // namespace moecomm::runtime
