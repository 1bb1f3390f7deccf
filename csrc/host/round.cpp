#include "round.h"

#include <cstddef>
#include <cstring>

namespace moecomm::host {

Round::Round(const Context& context, Op operation)
    : ctx(context),
      op(operation),
      me(context.rank),
      ranks(context.shape.ranks),
      state(*at<State>(context, me, context.window.state)),
      tag(state.round + 1),
      watch(ctx, op, tag) {}

void Round::announce(Notice mine, const i32* counts) {
    mine.op = static_cast<u32>(op);
    constexpr size_t body = offsetof(Notice, op);
    for (i32 turn = 0; turn < ranks; ++turn) {
        const i32 p = peer(turn);
        if (counts != nullptr) {
            std::memcpy(at<i32>(ctx, p, counts_at(ctx.window, ranks, tag, me)), counts, ctx.window.columns * sizeof(i32));
        }
        Notice* there = notice_in(p, me);
        std::memcpy(reinterpret_cast<u8*>(there) + body, reinterpret_cast<const u8*>(&mine) + body, sizeof(Notice) - body);
        store_release(&there->tag, tag_signal(tag));
    }
}

bool Round::notices_in() const {
    for (i32 p = 0; p < ranks; ++p)
        if (!has_tag(&notice_in(me, p)->tag, tag)) return false;
    return true;
}

bool Round::await_notices() {
    for (i32 p = 0; p < ranks; ++p)
        if (!watch.flag(Phase::notice, {p, &notice_in(me, p)->tag, tag})) return false;
    return true;
}

Verdict Round::judge() const {
    for (i32 p = 0; p < ranks; ++p) {
        const Verdict verdict = judge_notice(notice(me), notice(p), p, ctx.shape.experts);
        if (verdict.failure != Failure::none) return verdict;
    }
    return {Failure::none, Argument::none, -1, 0, 0};
}

void Round::leave_verdict(const Verdict& verdict) {
    FailureRecord record{};
    record.code = static_cast<u32>(verdict.failure);
    record.op = static_cast<u32>(op);
    record.phase = static_cast<u32>(Phase::notice);
    record.argument = static_cast<u32>(verdict.argument);
    record.rank = me;
    record.peer = verdict.peer;
    record.round = tag;
    record.expected = verdict.expected;
    record.seen = verdict.seen;
    leave_record(ctx, record);
}

}  // namespace moecomm::host
