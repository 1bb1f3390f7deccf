// Ranks that take no part in rounds: those that left, and those of Buffer.mask(). And calls that failed before their rounds.
#include "../protocol/resumed.h"
#include "executor.h"
#include "round.h"

namespace moecomm::host {

void count_rejected(const Context& ctx) { __atomic_fetch_add(&Round::state_of(ctx).rejected, 1, __ATOMIC_RELAXED); }

// Sent as the round header of the next round, so that a peer that starts that round learns of it at once and not at its deadline.  The
// counts are sent too, because this rank cannot know whether that round is a dispatch, which waits for them.
void leave(const Context& ctx) { Round(ctx, Op::leave).announce({}, std::vector<i32>(ctx.window.columns).data()); }

void exclude(const Context& ctx, i32 rank) {
    const u32 word = abort_word(Failure::excluded, rank);
    if (window_of(ctx, rank) == 0) return link_of(ctx).exclude(rank, word);
    store_release(at<u32>(ctx, rank, ctx.window.abort), word);
}

u32 last_round(const Context& ctx) {
    if (ctx.link != 0) link_of(ctx).drain();
    return Round::state_of(ctx).round;
}

void resume(const Context& ctx, u32 round, const u64* mask) {
    *at<Resumed>(ctx, ctx.rank, ctx.window.state) = resumed(round, mask);
    if (ctx.link != 0) {
        for (u64 which = 0; which < signals(ctx.shape); ++which) {
            *at<u64>(ctx, ctx.rank, signal_at(ctx.window, which)) = resumed_signal(ctx.shape.ranks, round, which);
            *at<u64>(ctx, ctx.rank, signal_value_at(ctx.window, which)) = 0;
        }
        link_of(ctx).begin_anew(ctx.rank, round);
    }
    store_release(at<u32>(ctx, ctx.rank, ctx.window.abort), 0u);
    forget_failure(ctx);
}

void forget_failure(const Context& ctx) {
    *memory<FailureRecord>(ctx.record) = FailureRecord{};
    if (ctx.abort_host != 0) store_release(memory<u32>(ctx.abort_host), 0u);
}

}  // namespace moecomm::host
