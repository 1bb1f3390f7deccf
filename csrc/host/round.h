// What dispatch and combine share: the number of the round, the notices, and how a round ends.
#pragma once
#include "../protocol/slots.h"
#include "wait.h"
#include "window.h"

namespace moecomm::host {

class Round {
  public:
    Round(const Context& ctx, Op op);

    const Context& ctx;
    const Op op;
    const i32 me;
    const i32 ranks;
    State& state;   // ours alone
    const u32 tag;  // the number of this round
    Watch watch;

    // Peers in the order we turn to them: the next rank first, so that no rank is everybody's first; ourselves last.
    i32 peer(i32 turn) const { return (me + 1 + turn) % ranks; }
    // The notice of `from` in this round; ours after announce(), the others' after await_notices().
    const Notice& notice(i32 from) const { return *notice_in(me, from); }
    // Tells every rank, ourselves included; `counts` (i32[columns], may be null) goes first.  Fills `tag`, `op` of `mine`.
    void announce(Notice mine, const i32* counts);
    bool notices_in() const;
    bool await_notices();
    // All notices against ours, in rank order: every rank comes to the same end.
    Verdict judge() const;
    // Leaves the record of a round that is void on every rank.  The Buffer goes on.
    void leave_verdict(const Verdict& verdict);
    void finish() { state.round = tag; }

  private:
    Notice* notice_in(i32 window, i32 from) const { return at<Notice>(ctx, window, notice_at(ctx.window, ranks, tag, from)); }
};

}  // namespace moecomm::host
