// The seal of a route.  A handle is memory that the caller holds and may have changed, and rounds compute addresses from its tables.  A
// round therefore first checks everything that it will read of them:
//   - every number is in the range of the table that it indexes, and
//   - the digest of all numbers is the one that the dispatch stored behind them (seal_of).  This covers rows at peers, whose ranges this
//     rank does not know.
// A rank with damaged tables announces that in its round header, and the round is invalid on every rank.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

// The route of a dispatch and the sizes of its tables.
struct Sealed {
    const Context& ctx;
    const Route& route;
    i32 layout;
    i32 num_tokens;  // of this rank
};
inline Sealed tables_of(const DispatchArgs& a) { return {a.ctx, a.route, a.layout, a.num_tokens}; }
inline Sealed tables_of(const CombineArgs& a) { return {a.ctx, a.route, a.layout, a.num_tokens}; }

// Store the digest.  The dispatch calls it when all of its rows have arrived, or when its round is invalid.
void seal(const Sealed& tables);
bool is_intact(const Sealed& tables);

}  // namespace moecomm::host
