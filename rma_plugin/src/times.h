// Time accounting of operations: sums over all communicators of this process, off unless MOECOMM_RMA_TIMES=1.
// Nothing here allocates, locks or waits. When off, each function costs one branch and reads no clock.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace moecomm::rma::times {

// moecomm/rma_plugin.py names the sums in this order. Times are nanoseconds of CLOCK_MONOTONIC.
enum Sum {
    kClockReads,  // clock reads of this accounting: its overhead
    kOperations,  // puts and gets posted
    kSignals,     // operations with a signal
    kBytes,       // bytes of these operations
    kEnded,       // operations that a poll has seen done, with their signals under way
    kUntilEnded,  // sum over them of the time from the start of the posting call until then
    kBusy,        // time with at least one such operation of a communicator open
    kPosting,     // time in posting calls
    kDriver,      // part of kPosting inside the CUDA driver
    kPolls,       // calls of test and progress
    kEmptyPolls,  // calls that found nothing
    kPolling,     // time in these calls
    kWords,       // signals written here, from peers and from this rank to itself
    kWriting,     // time spent writing them
    kSums,
};

constexpr uint64_t kVersion = 1;
struct Taken {         // filled by moecomm_rma_take_times
    uint64_t version;  // set by the caller: the version that it knows
    uint64_t on;
    uint64_t since;  // nanoseconds covered by the sums
    uint64_t sums[kSums];
};

inline std::atomic<bool> on{false};
inline bool enabled() { return on.load(std::memory_order_relaxed); }
void enable();
uint64_t now();
void add(Sum sum, uint64_t value);
int take(Taken* to);  // reads and resets the sums; not 0: unknown version

struct Open {  // open operations of a communicator, under its mutex
    size_t count = 0;
    uint64_t since = 0;
    uint64_t ended = 0;
};
struct Mark {  // of an operation; open is null if it is not timed or has ended
    Open* open = nullptr;
    uint64_t begin = 0;
    void end();
};

class Post {  // scope of a posting call
  public:
    Post() {
        if (enabled()) begin();
    }
    ~Post() {
        if (begin_ != 0) end();
    }
    Post(const Post&) = delete;
    Post& operator=(const Post&) = delete;
    Mark accept(uint64_t bytes, bool signals, Open& open) { return begin_ != 0 ? accepted(bytes, signals, open) : Mark(); }

  private:
    void begin();
    void end();
    Mark accepted(uint64_t bytes, bool signals, Open& open);
    uint64_t begin_ = 0;
    bool accepted_ = false;
};

class Driver {  // scope of a driver call; counted within a Post
  public:
    Driver() {
        if (enabled()) begin();
    }
    ~Driver() {
        if (begin_ != 0) end();
    }
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

  private:
    void begin();
    void end();
    uint64_t begin_ = 0;
};

class Poll {  // scope of a call of test or progress
  public:
    Poll() : begin_(enabled() ? now() : 0) {}
    ~Poll() {
        if (begin_ != 0) end();
    }
    Poll(const Poll&) = delete;
    Poll& operator=(const Poll&) = delete;
    void found() { found_ = true; }

  private:
    void end();
    uint64_t begin_;
    bool found_ = false;
};

class Writing {  // scope in which received signals are written
  public:
    Writing() : begin_(enabled() ? now() : 0) {}
    ~Writing() {
        if (begin_ != 0) end();
    }
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;
    void wrote() { ++words_; }

  private:
    void end();
    uint64_t begin_, words_ = 0;
};

}  // namespace moecomm::rma::times
