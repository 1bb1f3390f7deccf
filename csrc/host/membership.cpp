// Ranks that take no part in rounds: see Buffer.mask().
#include "../protocol/resumed.h"
#include "executor.h"
#include "round.h"

namespace moecomm::host {

void exclude(const Context& ctx, i32 rank) { store_release(at<u32>(ctx, rank, ctx.window.abort), abort_word(Failure::excluded, rank)); }

void resume(const Context& ctx, u32 round, const u64* mask) {
    *at<Resumed>(ctx, ctx.rank, ctx.window.state) = resumed(round, mask);
    store_release(at<u32>(ctx, ctx.rank, ctx.window.abort), 0u);
    forget_failure(ctx);
}

void forget_failure(const Context& ctx) {
    *memory<FailureRecord>(ctx.record) = FailureRecord{};
    if (ctx.abort_host != 0) store_release(memory<u32>(ctx.abort_host), 0u);
}

}  // namespace moecomm::host
