// Announcements outside rounds: a failed call, and the end of this rank's participation.
#include "executor.h"
#include "round.h"

namespace moecomm::host {

void count_rejected(const Context& ctx) { __atomic_fetch_add(&Round::state_of(ctx).rejected, 1, __ATOMIC_RELAXED); }

// Sent as the round header of the next round, so that a peer that starts that round learns of it at once and not at its deadline.  The
// counts are sent too, because this rank cannot know whether that round is a dispatch, which waits for them.
void leave(const Context& ctx) { Round(ctx, Op::leave).announce({}, std::vector<i32>(ctx.window.columns).data()); }

}  // namespace moecomm::host
