// Ranks that take no part in rounds: see Buffer.mask().
#include <algorithm>

#include "executor.h"
#include "round.h"

namespace moecomm::host {

void exclude(const Context& ctx, i32 rank) { store_release(at<u32>(ctx, rank, ctx.window.abort), abort_word(Failure::excluded, rank)); }

void resume(const Context& ctx, u32 round, const u64* mask) {
    Mask& own = *at<Mask>(ctx, ctx.rank, mask_at(ctx.window));
    own.since = round_tag(round + 1);
    std::copy_n(mask, kMaskWords, own.ranks);
    State& state = Round::state_of(ctx);
    state.round = round;
    state.rejected = 0;
    // Nobody reads rows that earlier rounds have staged, and no dispatch has begun.
    state.last_combine = state.last_dispatch = 0;
    *memory<FailureRecord>(ctx.record) = FailureRecord{};
    store_release(at<u32>(ctx, ctx.rank, ctx.window.abort), 0u);
    if (ctx.abort_host != 0) store_release(memory<u32>(ctx.abort_host), 0u);
}

}  // namespace moecomm::host
