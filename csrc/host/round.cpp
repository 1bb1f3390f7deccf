#include "round.h"

#include <algorithm>
#include <cstring>

namespace moecomm::host {

Round::Round(const Context& context, Op operation, u32 round_tag)
    : ctx(context),
      op(operation),
      me(context.rank),
      ranks(context.shape.ranks),
      near(domain_ranks(context.shape)),
      first(me - me % near),
      state(state_of(context)),
      tag(round_tag),
      watch(ctx, op, tag),
      notices_(ranks) {}

// Every word with release: a peer that has them all may write to our output, which we are done with.
void Round::announce(Notice mine, const i32* counts) {
    mine.op = static_cast<u32>(op);
    mine.rejected = load_relaxed(&state.rejected);
    u32 words[kNoticeWords];
    std::memcpy(words, &mine, sizeof(words));
    if (domains() > 1) announce_far(words, counts);
    for (i32 turn = 0; turn < near; ++turn) {
        u64* there = mail(neighbour(turn), me);
        for (i32 w = 0; w < kNoticeWords; ++w) store_release(&there[w], word_signal(tag, words[w]));
        if (counts == nullptr) continue;
        for (i32 c = 0; c < ctx.window.columns; ++c) store_release(&there[kNoticeWords + c], word_signal(tag, static_cast<u32>(counts[c])));
    }
}

// The same words in one put.
void Round::announce_far(const u32* words, const i32* counts) {
    std::vector<u64> letter;
    for (i32 w = 0; w < kNoticeWords; ++w) letter.push_back(word_signal(tag, words[w]));
    for (i32 c = 0; c < ctx.window.columns && counts != nullptr; ++c) letter.push_back(word_signal(tag, static_cast<u32>(counts[c])));
    for (i32 turn = 0; turn < ranks; ++turn) {
        const i32 to = peer(turn);
        if (reaches(to)) continue;
        link().put(to, mail_at(ctx.window, ranks, tag, me), letter.data(), letter.size() * sizeof(u64));
        link().signal(to, mail_signal(me), mail_value(tag));
    }
}

// A rank may have sent the mail of the round after this one already.
bool Round::mail_landed(i32 from) const { return reaches(from) || mail_has_come(load_acquire(signal(mail_signal(from))), tag); }

bool Round::read_notice(i32 from) {
    if (!mail_landed(from)) return false;
    const u64* here = mail(me, from);
    u32 words[kNoticeWords];
    for (i32 w = 0; w < kNoticeWords; ++w) {
        const u64 word = load_acquire(&here[w]);
        if (signal_tag(word) != tag) return false;
        words[w] = signal_word(word);
    }
    std::memcpy(&notices_[from], words, sizeof(words));
    return true;
}

bool Round::notices_in() {
    const u32 all = static_cast<u32>(ranks);
    if (load_acquire(&read_) == all) return true;
    std::lock_guard<std::mutex> lock(reading_);
    u32 read = read_;
    while (read < all && read_notice(static_cast<i32>(read))) ++read;
    store_release(&read_, read);
    return read == all;
}

Missing Round::missing_notice() const {
    const i32 from = std::min(static_cast<i32>(load_acquire(&read_)), ranks - 1);
    if (!mail_landed(from)) return {from, signal(mail_signal(from)), tag};
    const u64* here = mail(me, from);
    i32 w = 0;
    while (w < kNoticeWords - 1 && has_tag(&here[w], tag)) ++w;
    return {from, &here[w], tag};
}

bool Round::await_notices() {
    return watch.until(Phase::notice, [&] { return notices_in(); }, [&] { return missing_notice(); });
}

void Round::keep_notices() const {
    if (domains() > 1) std::copy_n(&notices_[first], near, at<Notice>(ctx, me, ctx.window.begun));
}

void Round::recall_notices() {
    if (domains() > 1) std::copy_n(at<const Notice>(ctx, me, ctx.window.begun), near, &notices_[first]);
}

Verdict Round::judge() const {
    for (i32 p = 0; p < ranks; ++p) {
        const Verdict verdict = judge_notice(notice(me), notice(p), p, ctx.shape.experts);
        if (verdict.failure != Failure::none) return verdict;
    }
    return {Failure::none, Argument::none, -1, 0, 0};
}

bool Round::await_counts() {
    i32 from = 0, column = 0;
    const auto word = [&] { return &mail(me, from)[kNoticeWords + column]; };
    const auto all_in = [&] {
        for (; from < ranks; ++from, column = 0)
            for (; column < ctx.window.columns; ++column)
                if (!has_tag(word(), tag)) return false;
        return true;
    };
    return watch.until(Phase::notice, all_in, [&] { return Missing{from, word(), tag}; });
}

void Round::add_counts(i32 from, i32* sums) const {
    const u64* counts = mail(me, from) + kNoticeWords;
    for (i32 c = 0; c < ctx.window.columns; ++c) sums[c] += static_cast<i32>(signal_word(load_relaxed(&counts[c])));
}

void Round::leave_verdict(const Verdict& verdict) {
    FailureRecord record{};
    record.code = static_cast<u32>(verdict.failure);
    record.op = static_cast<u32>(op);
    record.phase = static_cast<u32>(Phase::notice);
    record.argument = static_cast<u32>(verdict.argument);
    record.rank = me;
    record.peer = verdict.peer;
    record.round = round_number(tag);
    record.expected = verdict.expected;
    record.seen = verdict.seen;
    leave_record(ctx, record);
}

}  // namespace moecomm::host
