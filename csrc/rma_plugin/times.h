// Where the time of operations goes: sums over all communicators of this process, off unless MOECOMM_RMA_TIMES=1.
// Nothing here allocates, locks or waits; off, each of it is one branch, and no clock is read.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace moecomm::rma::times {

// moecomm/rma_plugin.py has their names in this order.  Times are nanoseconds of CLOCK_MONOTONIC.
enum Sum {
    kClockReads,  // for all of this: what it costs
    kOperations,  // puts and gets posted
    kSignals,     // those with a signal behind them
    kBytes,       // what they move
    kEnded,       // those that a poll has seen done, and their signals on their way
    kUntilEnded,  // by these: from the begin of the call that posted one until then
    kBusy,        // while at least one of a communicator was between the two
    kPosting,     // inside the calls that post
    kDriver,      // and of that inside the CUDA driver
    kPolls,       // calls of test and progress
    kEmptyPolls,  // those that found nothing
    kPolling,     // inside all of them
    kWords,       // signals written here: of others, and our own to ourselves
    kWriting,     // while they were
    kSums,
};

constexpr uint64_t kVersion = 1;
struct Taken {         // by moecomm_rma_take_times
    uint64_t version;  // set by the caller: what it knows
    uint64_t on;
    uint64_t since;  // nanoseconds for which these have been added up
    uint64_t sums[kSums];
};

inline std::atomic<bool> on{false};
inline bool enabled() { return on.load(std::memory_order_relaxed); }
void enable();
uint64_t now();
void add(Sum sum, uint64_t value);
int take(Taken* to);  // and begins anew; not 0: a version that is not known

struct Open {  // operations of a communicator that are under way, under its mutex
    size_t count = 0;
    uint64_t since = 0;
    uint64_t ended = 0;
};
struct Mark {  // of an operation; open is null if it is not timed, or not any more
    Open* open = nullptr;
    uint64_t begin = 0;
    void end();
};

class Post {  // lives as long as a call that posts
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

class Driver {  // lives as long as a step inside the driver; counts within a Post
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

class Poll {  // lives as long as a call of test or progress
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

class Writing {  // lives as long as signals that came are written
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
