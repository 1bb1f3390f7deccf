// The steps of rounds, timed, of ranks that are traced. A rank that is not traced has no log, and pays one load a round for that.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "../protocol/deadline.h"
#include "../protocol/record.h"

namespace moecomm::host {

// A step of a round, or a wait in it.
struct Step {
    u64 begin_ns, end_ns;  // CLOCK_MONOTONIC
    u32 round;
    i32 worker;        // thread of the rank's team
    i32 peer;          // the rank that was waited for; -1: no wait
    const char* name;  // a literal
};

// The steps of one rank, until take(). Threads of the rank add concurrently.
class StepLog {
  public:
    struct Taken {
        std::vector<Step> steps;
        u64 dropped;  // steps that had no room
    };
    void add(const Step& step);
    Taken take();

  private:
    static constexpr size_t kMost = 1 << 16;

    std::mutex mutex_;
    std::vector<Step> steps_;
    u64 dropped_ = 0;
};

// Begin or end to log the steps of the rank whose failure record is at this address, by which ranks of a process differ.
void trace_rounds(u64 record, bool on);
// The log of that rank; null if it is not traced.
std::shared_ptr<StepLog> steps_of(u64 record);

// The worker that the calling thread is, for steps that it adds.
i32& this_worker();

const char* name_of(Phase phase);

// Adds a step that lasts from construction to destruction, if there is a log.
class Timed {
  public:
    Timed(StepLog* log, u32 round, const char* name) : log_(log), round_(round), name_(name), begin_ns_(log == nullptr ? 0 : now_ns()) {}
    ~Timed() {
        if (log_ != nullptr) log_->add({begin_ns_, now_ns(), round_, this_worker(), -1, name_});
    }
    // End the step, and begin another.
    void next(const char* name) {
        if (log_ == nullptr) return;
        const u64 now = now_ns();
        log_->add({begin_ns_, now, round_, this_worker(), -1, name_});
        name_ = name;
        begin_ns_ = now;
    }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

  private:
    StepLog* const log_;
    const u32 round_;
    const char* name_;
    u64 begin_ns_;
};

}  // namespace moecomm::host
