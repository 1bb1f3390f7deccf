// Waits for peers, and the failure record of a wait that fails.
#pragma once
#include "../protocol/args.h"
#include "../protocol/deadline.h"
#include "steps.h"

namespace moecomm::host {

inline bool has_tag(const u64* flag, u32 tag) { return signal_tag(load_acquire(flag)) == tag; }

// A flag that has not arrived: the peer that should set it, and the expected tag.
struct Missing {
    i32 peer;
    const u64* flag;
    u32 tag;
};

// The waits of one round.  The first one that fails writes the failure record and sets the abort words of this rank and its peers; from
// then on every wait of this rank ends.  All threads of the rank may call concurrently.
class Watch {
  public:
    Watch(const Context& ctx, Op op, u32 tag);

    // Wait until `ready()` returns true; on timeout or abort, fail the round, call `missing()` for the record, and return false.
    template <class Ready, class Find>
    bool until(Phase phase, const Ready& ready, const Find& missing) {
        if (ready()) return true;
        const u64 start = now_ns();
        const i32 peer = log_ == nullptr ? -1 : missing().peer;
        const Waited waited = wait_until(deadline_, ready);
        if (log_ != nullptr) log_->add({start, now_ns(), round_number(tag_), this_worker(), peer, name_of(phase)});
        if (waited == Waited::ok) return true;
        fail(waited, phase, missing(), now_ns() - start);
        return false;
    }
    // Fail the round and return true if an abort word is set already.  A round that never waits would not notice otherwise.
    bool aborted();
    // Time a step of the round, as long as what this returns lives.
    Timed timed(const char* name) const { return {log_.get(), round_number(tag_), name}; }
    bool failed() const { return load_relaxed(&claimed_) != 0; }

  private:
    u32 abort_seen() const;
    void fail(Waited waited, Phase phase, const Missing& missing, u64 waited_ns);

    const Context& ctx_;
    const Op op_;
    const u32 tag_;
    const Deadline deadline_;
    const std::shared_ptr<StepLog> log_;  // null unless the rank is traced
    u32 claimed_ = 0;                     // 1 once a wait has failed; the thread that set it writes the record
};

}  // namespace moecomm::host
