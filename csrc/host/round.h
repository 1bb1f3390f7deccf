// The part common to dispatch and combine: the tag, the round headers and their validation, and the end of the round.
#pragma once
#include <mutex>
#include <vector>

#include "../protocol/placement.h"
#include "../protocol/stand_ins.h"
#include "scaleout_link.h"
#include "wait.h"
#include "window.h"

namespace moecomm::host {

class Round {
  public:
    // The next round; with `tag`, a round that has begun (the second half of a dispatch).
    Round(const Context& ctx, Op op) : Round(ctx, op, round_tag(state_of(ctx).round + 1)) {}
    Round(const Context& ctx, Op op, u32 tag);

    const Context& ctx;
    const Op op;
    const i32 me;
    const i32 ranks;
    const i32 scaleup_ranks;  // ranks in this domain
    const i32 first;          // first rank of this domain
    State& state;             // only this rank reads and writes it
    const u32 tag;
    Watch watch;
    const Mask& mask;
    const Placement& placement;

    static State& state_of(const Context& ctx) { return *at<State>(ctx, ctx.rank, ctx.window.state); }
    // The peer of a rotation step: the next rank first, so that ranks start with different peers; this rank last.
    i32 peer(i32 step) const { return (me + 1 + step) % ranks; }
    // The peer of a rotation step among the ranks of this domain, whose windows this rank loads from and stores to.
    i32 neighbor(i32 step) const { return first + (me - first + 1 + step) % scaleup_ranks; }
    bool reaches(i32 rank) const { return rank >= first && rank < first + scaleup_ranks; }
    // True if the rank takes no part.  Nothing is read that it wrote; its header counts as this rank's, without tokens.
    bool masked(i32 rank) const { return is_masked(mask, rank); }
    i32 domain() const { return first / scaleup_ranks; }
    i32 domains() const { return ranks / scaleup_ranks; }
    // The rank of another domain that forwards this rank's tokens there; -1: none is left.
    i32 forwarder(i32 domain) const { return stand_in(domain).rank; }
    // The column of this rank's rings at that rank.
    i32 column_at_forwarder(i32 domain) const { return column_of(ctx.shape, this->domain(), stand_in(domain).share); }
    // The rank of another domain whose tokens this rank forwards in a column of its rings; -1: none.
    i32 source_of(i32 column) const;
    i32 columns() const { return domains() * ring_shares(ctx.shape, mask.ranks); }
    // The rank of this domain that pulls for `rank`: itself, or its forwarder here.
    i32 local(i32 rank) const { return reaches(rank) ? rank : moecomm::stand_in(ctx.shape, mask.ranks, first + rank % scaleup_ranks).rank; }
    const u64* signal(u64 which) const { return at<const u64>(ctx, me, signal_at(ctx.window, which)); }
    Link& link() const { return link_of(ctx); }

    // Send the header, and `counts` (i32[columns]) if not null, to every rank including this one.  Fills `op` and `rejected` of `mine`.
    void announce(RoundHeader mine, const i32* counts);
    // True once the tagged words of `from`, a rank of another domain, and all its earlier puts are visible.  Always true in this domain,
    // whose ranks store word by word: check the tag of each word.
    bool tagged_words_arrived(i32 from) const;
    // True if all headers have arrived.  Any thread may call; await_headers() waits, and returns false if the round has failed.
    bool headers_in();
    bool await_headers();
    // True if `from` has sent the header of another call: what it sends ahead of a dispatch's header may then never come.
    bool calls_otherwise(i32 from, u64 call) const;
    // The header of `from`; valid once headers_in() has returned true.
    const RoundHeader& header(i32 from) const { return headers_[from]; }
    // Keep the headers of this domain for the second half of a dispatch: by then later rounds may have overwritten the tagged words.
    void save_headers() const;
    void load_headers();
    // Validate all headers against this rank's, in rank order, so that every rank reaches the same result.
    ValidationResult validate_headers() const;

    // Wait for the counts of all ranks; false if the round has failed.  Call only in a valid dispatch that is no repeat: ranks send counts
    // in no other round.
    bool await_counts();
    // The count of `from` in a column.
    i32 count_of(i32 from, i32 column) const {
        return static_cast<i32>(signal_word(load_relaxed(tagged_words(me, from) + kHeaderWords + column)));
    }
    // sums[column] += count of `from`, for every column.
    void add_counts(i32 from, i32* sums) const;

    // Fill the failure record of an invalid round.  The Buffer stays usable.
    void leave_validation_result(const ValidationResult& validation);
    void finish() { state.round = round_number(tag); }

  private:
    StandIn stand_in(i32 domain) const { return moecomm::stand_in(ctx.shape, mask.ranks, forwarder_of(ctx.shape, me, domain)); }
    u64* tagged_words(i32 window, i32 from) const { return at<u64>(ctx, window, tagged_words_at(ctx.window, ranks, tag, from)); }
    void announce_scaleout(const u32* words, const i32* counts);
    bool read_header(i32 from);
    bool header_arrived(i32 from) const { return tagged_words_arrived(from) && has_tag(tagged_words(me, from) + kHeaderWords - 1, tag); }
    Missing missing_header() const;

    RoundHeader absent_{};              // of masked ranks
    std::vector<RoundHeader> headers_;  // by rank; the first `read_` are valid
    u32 read_ = 0;
    u32 timed_ = 0;  // 1 once a thread waits for headers: it alone counts the time
    std::mutex reading_;
};

// Rings are divided among the source ranks of masked forwarders (protocol/stand_ins.h).
// Call run(args), with rings of the length that the mask of this rank wants.
template <class Args, class Run>
void with_shared_rings(const Args& args, const Run& run) {
    if (domains(args.ctx.shape) == 1) return run(args);
    Args shared = args;
    const Mask& mask = *at<const Mask>(args.ctx, args.ctx.rank, mask_at(args.ctx.window));
    i32& ring = shared.ctx.shape.ring_tokens;
    ring = shared_ring_tokens(ring, ring_shares(args.ctx.shape, mask.ranks));
    run(shared);
}

}  // namespace moecomm::host
