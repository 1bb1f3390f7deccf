#include "round.h"

#include <algorithm>
#include <cstring>

#include "../protocol/record.h"
#include "counters.h"

namespace moecomm::host {

Round::Round(const Context& context, Op operation, u32 round_tag)
    : ctx(context),
      op(operation),
      me(context.rank),
      ranks(context.shape.ranks),
      scaleup_ranks(domain_ranks(context.shape)),
      first(me - me % scaleup_ranks),
      state(state_of(context)),
      tag(round_tag),
      watch(ctx, op, tag),
      mask(*at<const Mask>(ctx, me, mask_at(ctx.window))),
      placement(*at<const Placement>(ctx, me, placement_at(ctx.window))),
      headers_(ranks) {}

i32 Round::source_of(i32 column) const {
    const i32 from = column % domains(), as = forwards_as(ctx.shape, mask.ranks, me, column / domains());
    return from == domain() || as < 0 ? -1 : forwarder_of(ctx.shape, as, from);
}

// Each word is stored with release: a peer that has acquired all of them may overwrite this rank's output, which this rank no longer reads.
void Round::announce(RoundHeader mine, const i32* counts) {
    count_round(ctx);
    mine.op = static_cast<u32>(op);
    mine.rejected = load_relaxed(&state.rejected);
    absent_ = mine;
    absent_.status = static_cast<u32>(Argument::none);
    absent_.num_tokens = 0;
    u32 words[kHeaderWords];
    std::memcpy(words, &mine, sizeof(words));
    if (domains() > 1) announce_scaleout(words, counts);
    for (i32 step = 0; step < scaleup_ranks; ++step) {
        if (masked(neighbor(step))) continue;
        u64* there = tagged_words(neighbor(step), me);
        for (i32 w = 0; w < kHeaderWords; ++w) store_release(&there[w], word_signal(tag, words[w]));
        if (counts == nullptr) continue;
        for (i32 c = 0; c < ctx.window.columns; ++c) store_release(&there[kHeaderWords + c], word_signal(tag, static_cast<u32>(counts[c])));
    }
}

// Put the tagged words to each rank of other domains with one put and one signal.
void Round::announce_scaleout(const u32* words, const i32* counts) {
    std::vector<u64> send_slot;
    for (i32 w = 0; w < kHeaderWords; ++w) send_slot.push_back(word_signal(tag, words[w]));
    for (i32 c = 0; c < ctx.window.columns && counts != nullptr; ++c) send_slot.push_back(word_signal(tag, static_cast<u32>(counts[c])));
    for (i32 step = 0; step < ranks; ++step) {
        const i32 to = peer(step);
        if (reaches(to) || masked(to)) continue;
        link().put(to, tagged_words_at(ctx.window, ranks, tag, me), send_slot.data(), send_slot.size() * sizeof(u64));
        link().signal(to, tagged_words_signal(me), tagged_words_value(tag));
    }
}

// The signal may be that of the next round already, which the peer may have begun.
bool Round::tagged_words_arrived(i32 from) const {
    return reaches(from) || have_tagged_words_arrived(load_acquire(signal(tagged_words_signal(from))), tag);
}

bool Round::read_header(i32 from) {
    if (masked(from)) {
        headers_[from] = absent_;
        return true;
    }
    if (!tagged_words_arrived(from)) return false;
    const u64* here = tagged_words(me, from);
    u32 words[kHeaderWords];
    for (i32 w = 0; w < kHeaderWords; ++w) {
        const u64 word = load_acquire(&here[w]);
        if (signal_tag(word) != tag) return false;
        words[w] = signal_word(word);
    }
    std::memcpy(&headers_[from], words, sizeof(words));
    return true;
}

bool Round::calls_otherwise(i32 from, u64 call) const {
    const u64* here = tagged_words(me, from);
    const u64 low = load_acquire(&here[kCallWord]), high = load_acquire(&here[kCallWord + 1]), kind = load_acquire(&here[kOpWord]);
    if (signal_tag(low) != tag || signal_tag(high) != tag || signal_tag(kind) != tag) return false;
    RoundHeader header{};
    const u32 word = signal_word(kind);
    std::memcpy(&header, &word, sizeof(word));
    return header.op != static_cast<u32>(op) || (static_cast<u64>(signal_word(high)) << 32 | signal_word(low)) != call;
}

bool Round::headers_in() {
    const u32 all = static_cast<u32>(ranks);
    if (load_acquire(&read_) == all) return true;
    std::lock_guard<std::mutex> lock(reading_);
    u32 read = read_;
    while (read < all && read_header(static_cast<i32>(read))) ++read;
    store_release(&read_, read);
    return read == all;
}

Missing Round::missing_header() const {
    const i32 from = std::min(static_cast<i32>(load_acquire(&read_)), ranks - 1);
    if (!tagged_words_arrived(from)) return {from, signal(tagged_words_signal(from)), tag};
    const u64* here = tagged_words(me, from);
    i32 w = 0;
    while (w < kHeaderWords - 1 && has_tag(&here[w], tag)) ++w;
    return {from, &here[w], tag};
}

bool Round::await_headers() {
    if (headers_in()) return true;
    PeerWaits waits(ctx, Counter::wait_header);
    const bool times = compare_exchange(&timed_, 0, 1) == 0;
    const auto all_in = [&] {
        for (i32 p = 0; p < ranks && times; ++p) waits.look(p, header_arrived(p));
        return headers_in();
    };
    return watch.until(Phase::header, all_in, [&] { return missing_header(); });
}

void Round::save_headers() const {
    if (domains() > 1) std::copy_n(&headers_[first], scaleup_ranks, at<RoundHeader>(ctx, me, ctx.window.split_headers));
}

void Round::load_headers() {
    if (domains() > 1) std::copy_n(at<const RoundHeader>(ctx, me, ctx.window.split_headers), scaleup_ranks, &headers_[first]);
}

ValidationResult Round::validate_headers() const {
    for (i32 p = 0; p < ranks; ++p) {
        const ValidationResult validation = validate_header(header(me), header(p), p, named_experts(ctx.shape));
        if (validation.failure != Failure::none) return validation;
    }
    return {Failure::none, Argument::none, -1, 0, 0};
}

bool Round::await_counts() {
    i32 from = 0, column = 0;
    const auto word = [&] { return &tagged_words(me, from)[kHeaderWords + column]; };
    const auto all_in = [&] {
        for (; from < ranks; ++from, column = 0)
            for (; column < ctx.window.columns && !masked(from); ++column)
                if (!has_tag(word(), tag)) return false;
        return true;
    };
    return watch.until(Phase::header, all_in, [&] { return Missing{from, word(), tag}; });
}

void Round::add_counts(i32 from, i32* sums) const {
    if (masked(from)) return;
    const u64* counts = tagged_words(me, from) + kHeaderWords;
    for (i32 c = 0; c < ctx.window.columns; ++c) sums[c] += static_cast<i32>(signal_word(load_relaxed(&counts[c])));
}

void Round::leave_validation_result(const ValidationResult& validation) {
    FailureRecord record{};
    record.code = static_cast<u32>(validation.failure);
    record.op = static_cast<u32>(op);
    record.phase = static_cast<u32>(Phase::header);
    record.argument = static_cast<u32>(validation.argument);
    record.rank = me;
    record.peer = validation.peer;
    record.round = round_number(tag);
    record.expected = validation.expected;
    record.seen = validation.seen;
    leave_record(memory<FailureRecord>(ctx.record), record);
}

}  // namespace moecomm::host
