// What dispatch and combine share: the number of the round, the mail, and how a round ends.
#pragma once
#include <mutex>
#include <vector>

#include "../protocol/domains.h"
#include "scaleout/link.h"
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
    const i32 scaleup_ranks;  // ranks of our domain
    const i32 first;          // the first of them
    State& state;             // ours alone
    const u32 tag;            // of this round
    Watch watch;

    static State& state_of(const Context& ctx) { return *at<State>(ctx, ctx.rank, ctx.window.state); }
    // Peers in the order we turn to them: the next rank first, so that no rank is everybody's first; ourselves last.
    i32 peer(i32 step) const { return (me + 1 + step) % ranks; }
    // The same in our domain: those whose windows we load from and store to.
    i32 neighbor(i32 step) const { return first + (me - first + 1 + step) % scaleup_ranks; }
    bool reaches(i32 rank) const { return rank >= first && rank < first + scaleup_ranks; }
    i32 domain() const { return first / scaleup_ranks; }
    i32 domains() const { return ranks / scaleup_ranks; }
    // The rank with our index in a domain: it relays for us there, and we for it here.
    i32 counterpart(i32 domain) const { return domain * scaleup_ranks + me - first; }
    // Who deals with `rank` in our domain: itself, or its relay.
    i32 local(i32 rank) const { return first + rank % scaleup_ranks; }
    // A signal of ours.
    const u64* signal(u64 which) const { return at<const u64>(ctx, me, signal_at(ctx.window, which)); }
    Link& link() const { return link_of(ctx); }

    // Tells every rank, ourselves included; `counts`: i32[columns], or null. Fills `op` of `mine`.
    void announce(RoundHeader mine, const i32* counts);
    // Has a rank of another domain put its mail, and all before it?  Those of our own store theirs word by word.
    bool tagged_words_arrived(i32 from) const;
    // Are all notices here?  Any thread may ask.
    bool headers_in();
    bool await_headers();
    // What `from` told us in this round, ourselves included, once all notices are in.
    const RoundHeader& header(i32 from) const { return headers_[from]; }
    // Keeps the notices of our domain for the second half of a dispatch, which comes when the mail may be that of later rounds.
    void save_headers() const;
    void load_headers();
    // All notices against ours, in rank order: every rank comes to the same end.
    ValidationResult validate_rank() const;

    // The counts come with the notices of a dispatch that all ranks agree on; with others they never come.
    bool await_counts();
    // sums[column] += the count of `from`.
    void add_counts(i32 from, i32* sums) const;

    // Leaves the record of a round that is void on every rank.  The Buffer goes on.
    void leave_validation_result(const ValidationResult& validation);
    void finish() { state.round = round_number(tag); }

  private:
    u64* tagged_words(i32 window, i32 from) const { return at<u64>(ctx, window, tagged_words_at(ctx.window, ranks, tag, from)); }
    void announce_scaleout(const u32* words, const i32* counts);
    bool read_header(i32 from);
    Missing missing_header() const;

    std::vector<RoundHeader> headers_;  // by rank: the first `read_` of them
    u32 read_ = 0;
    std::mutex reading_;
};

}  // namespace moecomm::host
