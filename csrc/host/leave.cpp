// What a rank says beside its rounds: that it could not make a call, and, last, that it will not take part in another round.
#include "executor.h"
#include "round.h"

namespace moecomm::host {

void count_rejected(const Context& ctx) { __atomic_fetch_add(&Round::state_of(ctx).rejected, 1, __ATOMIC_RELAXED); }

// In place of the mail of the next round, so that whoever starts that round learns it at once instead of at its deadline.  All of it,
// because we can't know which words that round's operation waits for.
void leave(const Context& ctx) { Round(ctx, Op::leave).announce({}, std::vector<i32>(ctx.window.columns).data()); }

}  // namespace moecomm::host
