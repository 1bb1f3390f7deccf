// Waiting for peers, and what is left behind when a wait ends badly.
#pragma once
#include "../protocol/args.h"
#include "../protocol/deadline.h"

namespace moecomm::host {

inline bool has_tag(const u64* flag, u32 tag) { return signal_tag(load_acquire(flag)) == tag; }

// Leaves `record` for the host unless an earlier one is still there.  `code` is stored last, so a reader that sees it sees all.
void leave_record(const Context& ctx, const FailureRecord& record);

// One flag that is not there yet: whose it is and which tag it should carry.
struct Missing {
    i32 peer;
    const u64* flag;
    u32 tag;
};

// The waits of one round.  The first that fails leaves the record and sets the abort words, ours and the peers'; from then on every wait
// of this rank ends.  Used by all threads of the rank at once.
class Watch {
  public:
    Watch(const Context& ctx, Op op, u32 tag);

    // Waits until `ready()`.  Only if that fails is `missing()` asked for what the record shall name.  False: the round is lost.
    template <class Ready, class Find>
    bool until(Phase phase, const Ready& ready, const Find& missing) {
        if (ready()) return true;
        const u64 start = now_ns();
        const Waited waited = wait_until(deadline_, ready);
        if (waited == Waited::ok) return true;
        fail(waited, phase, missing(), now_ns() - start);
        return false;
    }
    // Fails the round if somebody has aborted it already: without waits, nobody would notice.
    bool aborted();
    bool failed() const { return load_relaxed(&claimed_) != 0; }

  private:
    u32 abort_seen() const;
    void fail(Waited waited, Phase phase, const Missing& missing, u64 waited_ns);

    const Context& ctx_;
    const Op op_;
    const u32 tag_;
    const Deadline deadline_;
    u32 claimed_ = 0;  // 1 once a thread has failed: only that one writes the record
};

}  // namespace moecomm::host
