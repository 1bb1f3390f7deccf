#include "wait.h"

#include "../protocol/record.h"
#include "scaleout_link.h"
#include "window.h"

namespace moecomm::host {

namespace {

Deadline deadline_of(const Context& ctx) {
    const u32* here = at<u32>(ctx, ctx.rank, ctx.window.abort);
    return {ctx.timeout_ns, here, ctx.abort_host != 0 ? memory<const u32>(ctx.abort_host) : here};
}

void abort_all_windows(const Context& ctx, u32 word) {
    // The ranks that have masked this one go on.
    u32* here = at<u32>(ctx, ctx.rank, ctx.window.abort);
    compare_exchange(here, 0, word);
    if (abort_cause(load_relaxed(here)) == Failure::excluded) return;
    for (i32 p = 0; p < ctx.shape.ranks; ++p) {
        if (window_of(ctx, p) != 0) {
            compare_exchange(at<u32>(ctx, p, ctx.window.abort), 0, word);
        } else if (ctx.link != 0) {
            link_of(ctx).abort(p, word);
        }
    }
}

}  // namespace

void abort_all(const Context& ctx) {
    const u32 word = abort_word(Failure::aborted, ctx.rank);
    FailureRecord record{};
    record.code = static_cast<u32>(Failure::aborted);
    record.rank = record.peer = ctx.rank;
    record.round = at<State>(ctx, ctx.rank, ctx.window.state)->round + 1;
    leave_record(memory<FailureRecord>(ctx.record), record);
    abort_all_windows(ctx, word);
}

Watch::Watch(const Context& ctx, Op op, u32 tag) : ctx_(ctx), op_(op), tag_(tag), deadline_(deadline_of(ctx)), log_(steps_of(ctx.record)) {}

u32 Watch::abort_seen() const {
    const u32 word = load_relaxed(deadline_.abort_here);
    return word != 0 ? word : load_relaxed(deadline_.abort_host);
}

bool Watch::aborted() {
    if (abort_seen() == 0) return false;
    const u64* own = at<u64>(ctx_, ctx_.rank, tagged_words_at(ctx_.window, ctx_.shape.ranks, tag_, ctx_.rank));
    fail(Waited::aborted, Phase::header, {ctx_.rank, own, tag_}, 0);
    return true;
}

void Watch::fail(Waited waited, Phase phase, const Missing& missing, u64 waited_ns) {
    if (compare_exchange(&claimed_, 0, 1) != 0) return;
    const u32 word = waited == Waited::aborted ? abort_seen() : abort_word(Failure::timeout, missing.peer);
    FailureRecord record{};
    record.code = static_cast<u32>(abort_cause(word));
    record.op = static_cast<u32>(op_);
    record.phase = static_cast<u32>(phase);
    record.rank = ctx_.rank;
    record.peer = abort_culprit(word);
    record.round = round_number(tag_);
    record.expected = round_number(missing.tag);
    record.seen = round_number(signal_tag(load_acquire(missing.flag)));
    record.waited_ns = waited_ns;
    leave_record(memory<FailureRecord>(ctx_.record), record);
    abort_all_windows(ctx_, word);
}

}  // namespace moecomm::host
