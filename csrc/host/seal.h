// Handles are bytes that a caller holds, and may have changed: tables of rows, from which addresses are made.  No round addresses anything
// by them before they have been looked through, all that it will read of them: every number lies in the table it counts in, and the sum
// over all of them is the one that the dispatch has left behind them (seal_of), so that rows of peers, of whose tables we know nothing, are
// those that the dispatch has found.  A rank whose tables are others says so in its notice, and the round is void on every rank.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

// What the tables of a dispatch are part of.
struct Sealed {
    const Context& ctx;
    const Route& route;
    i32 layout;
    i32 num_tokens;  // ours
};
inline Sealed tables_of(const DispatchArgs& a) { return {a.ctx, a.route, a.layout, a.num_tokens}; }
inline Sealed tables_of(const CombineArgs& a) { return {a.ctx, a.route, a.layout, a.num_tokens}; }

// By the dispatch, when all of it has come, or is void.
void seal(const Sealed& tables);
bool is_intact(const Sealed& tables);

}  // namespace moecomm::host
