// Final rows from counts. From the counts of all ranks, every rank computes, alone, the final row of each token it sends:
//
//   row of (token t of rank r, its k-th expert e at rank p)  =  group_start(p, e)                 where e's rows begin there
//                                                             + sum over s < r of counts[s][e]     rows of earlier ranks
//                                                             + entries (t', k') before (t, k) of r that chose e
//   flat row of (t of r, rank p)                             =  sum over s < r of slots[s][p]  +  earlier tokens of r with an expert on p
//
// Row order is by (expert, source rank, source token, k), whatever the timing.
#pragma once
#include "args.h"

namespace moecomm {

// The experts of each rank: consecutive ones, in order of ranks. The first `experts % ranks` ranks have one more than the others.
struct ExpertRanges {
    i32 experts, ranks;  // experts >= ranks

    MOECOMM_BOTH constexpr i32 least() const { return experts / ranks; }
    MOECOMM_BOTH constexpr i32 longer() const { return experts % ranks; }  // ranks with one more
    MOECOMM_BOTH constexpr i32 most() const { return least() + (longer() > 0 ? 1 : 0); }
    MOECOMM_BOTH constexpr i32 first(i32 rank) const { return rank * least() + (rank < longer() ? rank : longer()); }
    MOECOMM_BOTH constexpr i32 count(i32 rank) const { return least() + (rank < longer() ? 1 : 0); }
    MOECOMM_BOTH constexpr i32 owner(i32 expert) const {
        const i32 begin = longer() * most();  // first expert of a rank that has not one more
        return expert < begin ? expert / most() : longer() + (expert - begin) / least();
    }
    MOECOMM_BOTH constexpr i32 local(i32 expert) const { return longer() == 0 ? expert % least() : expert - first(owner(expert)); }
};

// Rows of each expert of a rank in the batched layout, from RoundHeader::max_rows. In the expert layout, groups begin at running sums of
// aligned_group.
MOECOMM_BOTH constexpr i32 batched_group(i32 max_rows, i32 experts_here) { return max_rows / experts_here; }
MOECOMM_BOTH constexpr i32 aligned_group(i32 count, i32 alignment) { return ceil_div(count, alignment) * alignment; }
MOECOMM_BOTH constexpr ExpertRanges expert_ranges(const Shape& s) { return {s.slots, s.ranks}; }
MOECOMM_BOTH constexpr bool valid_id(i64 id, i32 experts) { return id >= -1 && id < experts; }

// Joint result of all headers of a round. Every rank sees the same headers and counts, so all ranks agree.
struct ValidationResult {
    // none: go on. bad_input, mismatch: the round is invalid on every rank, and the Buffer stays usable, unless `argument` is `rejected`:
    // the ranks are out of step, which ends the Buffer. peer_lost: the peer has closed its Buffer.
    Failure failure;
    Argument argument;
    i32 peer;
    i64 expected, seen;
};

// Error for an expert with more rows than the `group` rows that a rank has for each expert.
MOECOMM_BOTH constexpr Argument batched_error(const Shape& s, i64 group) {
    return group < static_cast<i64>(s.ranks) * s.max_tokens ? Argument::max_rows : Argument::batched;
}

// Validates a peer's header against this rank's.
MOECOMM_BOTH ValidationResult validate_header(const RoundHeader& mine, const RoundHeader& theirs, i32 from, i32 experts) {
    if (theirs.op == static_cast<u32>(Op::leave)) return {Failure::peer_lost, Argument::none, from, 0, 0};
    if (theirs.rejected != mine.rejected) return {Failure::mismatch, Argument::rejected, from, mine.rejected, theirs.rejected};
    if (theirs.op != mine.op) return {Failure::mismatch, Argument::none, from, mine.op, theirs.op};
    if (theirs.status != static_cast<u32>(Argument::none))
        return {Failure::bad_input, static_cast<Argument>(theirs.status), from, experts, theirs.bad_value};
    if (theirs.call != mine.call)
        return {Failure::mismatch, Argument::none, from, static_cast<i64>(mine.call), static_cast<i64>(theirs.call)};
    if (theirs.route_round != mine.route_round && mine.status == static_cast<u32>(Argument::none))
        return {Failure::mismatch, Argument::handle, from, mine.route_round, theirs.route_round};
    return {Failure::none, Argument::none, -1, 0, 0};
}

}  // namespace moecomm
