// What dispatch and combine share: the number of the round, the mail, and how a round ends.
#pragma once
#include <mutex>
#include <vector>

#include "../protocol/domains.h"
#include "link.h"
#include "wait.h"
#include "window.h"

namespace moecomm::host {

class Round {
  public:
    // The round that comes next, or an earlier one that is not over yet.
    Round(const Context& ctx, Op op) : Round(ctx, op, round_tag(state_of(ctx).round + 1)) {}
    Round(const Context& ctx, Op op, u32 tag);

    const Context& ctx;
    const Op op;
    const i32 me;
    const i32 ranks;
    const i32 near;   // ranks of our domain
    const i32 first;  // the first of them
    State& state;     // ours alone
    const u32 tag;    // of this round
    Watch watch;

    static State& state_of(const Context& ctx) { return *at<State>(ctx, ctx.rank, ctx.window.state); }
    // Peers in the order we turn to them: the next rank first, so that no rank is everybody's first; ourselves last.
    i32 peer(i32 turn) const { return (me + 1 + turn) % ranks; }
    // The same in our domain: those whose windows we load from and store to.
    i32 neighbour(i32 turn) const { return first + (me - first + 1 + turn) % near; }
    bool reaches(i32 rank) const { return rank >= first && rank < first + near; }
    i32 domain() const { return first / near; }
    i32 domains() const { return ranks / near; }
    // The rank with our index in a domain: it relays for us there, and we for it here.
    i32 counterpart(i32 domain) const { return domain * near + me - first; }
    // Who deals with `rank` in our domain: itself, or its relay.
    i32 local(i32 rank) const { return first + rank % near; }
    // A signal of ours.
    const u64* signal(u64 which) const { return at<const u64>(ctx, me, signal_at(ctx.window, which)); }
    Link& link() const { return link_of(ctx); }

    // Tells every rank, ourselves included; `counts`: i32[columns], or null. Fills `op` of `mine`.
    void announce(Notice mine, const i32* counts);
    // Has a rank of another domain put its mail, and all before it?  Those of our own store theirs word by word.
    bool mail_landed(i32 from) const;
    // Are all notices here?  Any thread may ask.
    bool notices_in();
    bool await_notices();
    // What `from` told us in this round, ourselves included, once all notices are in.
    const Notice& notice(i32 from) const { return notices_[from]; }
    // Keeps the notices of our domain for the second half of a dispatch, which comes when the mail may be that of later rounds.
    void keep_notices() const;
    void recall_notices();
    // All notices against ours, in rank order: every rank comes to the same end.
    Verdict judge() const;

    // The counts come with the notices of a dispatch that all ranks agree on; with others they never come.
    bool await_counts();
    // sums[column] += the count of `from`.
    void add_counts(i32 from, i32* sums) const;

    // Leaves the record of a round that is void on every rank.  The Buffer goes on.
    void leave_verdict(const Verdict& verdict);
    void finish() { state.round = round_number(tag); }

  private:
    u64* mail(i32 window, i32 from) const { return at<u64>(ctx, window, mail_at(ctx.window, ranks, tag, from)); }
    void announce_far(const u32* words, const i32* counts);
    bool read_notice(i32 from);
    Missing missing_notice() const;

    std::vector<Notice> notices_;  // by rank: the first `read_` of them
    u32 read_ = 0;
    std::mutex reading_;
};

}  // namespace moecomm::host
