#include "failure_cases.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "failure_fixture.h"
#include "host/executor.h"
#include "host/seal.h"
#include "protocol/deadline.h"

namespace moecomm::test {

namespace {

std::string absent_from_dispatch() {
    Fixture f(Layout::expert, kShort);
    f.cluster.run([&](i32 rank) {
        if (rank != 1) host::dispatch(f.dispatches[rank]);
    });
    std::string problem;
    for (i32 rank : {0, 2}) {
        const FailureRecord& r = f.cluster.record(rank);
        if (problem.empty()) problem = check_record(r, {Failure::timeout, Op::dispatch, Phase::header, 1, 1, Argument::none, 1, 0}, rank);
        if (problem.empty() && f.state(rank).round != 0) problem = "a lost round counts";
    }
    for (i32 rank = 0; rank < kRanks && problem.empty(); ++rank)
        if (*f.cluster.abort_word(rank) != abort_word(Failure::timeout, 1)) problem = "an abort word does not name rank 1";
    if (!problem.empty()) return problem;
    // The first to expire wakes the other.
    const bool first = f.cluster.record(0).waited_ns > f.cluster.record(2).waited_ns;
    return check_waited(f.cluster.record(first ? 0 : 2));
}

std::string absent_from_combine() {
    Fixture f(Layout::batched, kShort);
    f.dispatch_all();
    f.cluster.run([&](i32 rank) {
        if (rank != 2) host::combine(f.combines[rank]);
    });
    for (i32 rank : {0, 1}) {
        const std::string problem = check_record(f.cluster.record(rank), {Failure::timeout, Op::combine, Phase::header, 2, 2}, rank);
        if (!problem.empty()) return problem;
    }
    return "";
}

// Rank `from` is played by hand from here: rank 0 gets its mail, and then nothing.  Returns the mail.
u64* announce_as(Fixture& f, i32 from, Op op, u32 round, i32 tokens, u64 call) {
    RoundHeader n{};
    n.op = static_cast<u32>(op);
    n.call = call;
    n.route_round = op == Op::combine ? round_tag(1) : 0;  // of what was dispatched in round 1
    n.num_tokens = tokens;
    n.chunk_tokens = 8;
    n.max_rows = 1 << 20;
    u32 words[kHeaderWords];
    std::memcpy(words, &n, sizeof(words));
    u64* tagged_words = &f.word(0, tagged_words_at(f.cluster.window, kRanks, round_tag(round), from));
    for (i32 w = 0; w < f.cluster.window.num_tagged_words; ++w)
        store_release(&tagged_words[w], word_signal(round_tag(round), w < kHeaderWords ? words[w] : 0));
    return tagged_words;
}

// One word of rank 1's mail still has the value of two rounds ago.
std::string word_missing(i32 word) {
    Fixture f(Layout::expert, kShort);
    DispatchArgs alone = f.dispatches[0];
    alone.num_tokens = 0;
    u64* tagged_words = announce_as(f, 1, Op::dispatch, 1, 0, alone.call);
    announce_as(f, 2, Op::dispatch, 1, 0, alone.call);
    const u32 earlier = static_cast<u32>(-1);
    tagged_words[word] = word_signal(earlier, signal_word(tagged_words[word]));
    host::dispatch(alone);
    const std::string problem = check_record(
        f.cluster.record(0), {Failure::timeout, Op::dispatch, Phase::header, 1, 1, Argument::none, 1, round_number(earlier)}, 0);
    return problem.empty() ? check_waited(f.cluster.record(0)) : problem;
}

std::string silent_after_header() {
    Fixture f(Layout::flat, kShort);
    DispatchArgs alone = f.dispatches[0];
    alone.num_tokens = 0;
    announce_as(f, 1, Op::dispatch, 1, 9, alone.call);
    announce_as(f, 2, Op::dispatch, 1, 0, alone.call);
    f.word(0, arrived_at(f.cluster.window, f.scenario.shape, 1, 0)) = chunk_signal(1, 0, 0);
    host::dispatch(alone);  // rank 1 has a second chunk, and that never comes
    const std::string problem =
        check_record(f.cluster.record(0), {Failure::timeout, Op::dispatch, Phase::payload, 1, 1, Argument::none, 1, 0}, 0);
    return problem.empty() ? check_waited(f.cluster.record(0)) : problem;
}

std::string silent_reducer() {
    Fixture f(Layout::flat, kShort);
    f.dispatch_all();
    for (i32 from : {1, 2}) announce_as(f, from, Op::combine, 2, 0, f.combines[0].call);
    ReceiveBuffer& l = f.scenario.steps[0].dispatch->receive_buffer[0];
    std::fill_n(l.sent.begin(), kRanks, SourceTokens{0, 1});                                      // nothing to stage
    for (size_t i = 0; i < l.token_slot.size(); ++i) l.token_slot[i] = i % kRanks == 1 ? 0 : -1;  // all our tokens went to rank 1
    host::seal(host::tables_of(f.combines[0]));
    host::combine(f.combines[0]);
    return check_record(f.cluster.record(0), {Failure::timeout, Op::combine, Phase::reduced, 1, 2, Argument::none, 2, 0}, 0);
}

// Rank 1 has more tokens here than a ring holds, and pulls none.
std::string silent_source_rank() {
    Fixture f(Layout::flat, kShort);
    f.dispatch_all();
    for (i32 from : {1, 2}) announce_as(f, from, Op::combine, 2, 0, f.combines[0].call);
    ReceiveBuffer& l = f.scenario.steps[0].dispatch->receive_buffer[0];
    l.sent = {{0, 1}, {kTokens, 1}, {0, 1}, l.sent[kRanks], l.sent[kRanks + 1]};
    l.ranges.assign(kRanks * kTokens, static_cast<u32>(chunk_signal(0, 0, 1)));  // each of them a row here, whichever
    f.combines[0].num_tokens = 0;
    host::seal(host::tables_of(f.combines[0]));
    host::combine(f.combines[0]);
    const i32 ring = f.scenario.shape.ring_tokens;
    const std::string problem =
        check_record(f.cluster.record(0), {Failure::timeout, Op::combine, Phase::drained, 1, 2, Argument::none, 2, 0}, 0);
    if (!problem.empty()) return problem;
    const bool last = signal_tag(f.word(1, reduced_at(f.cluster.window, f.scenario.shape, 0, ring - 1))) == round_tag(2);
    const bool beyond = signal_tag(f.word(1, reduced_at(f.cluster.window, f.scenario.shape, 0, ring))) == round_tag(2);
    return last && !beyond ? "" : "it staged more or less than the ring holds";
}

std::string silent_after_begin() {
    Fixture f(Layout::expert, kShort);
    for (DispatchArgs& a : f.dispatches) a.part = static_cast<i32>(Part::begin);
    f.dispatch_all();
    f.word(0, arrived_at(f.cluster.window, f.scenario.shape, 1, 0)) = 0;  // as if it had never come
    f.dispatches[0].part = static_cast<i32>(Part::end);
    host::dispatch(f.dispatches[0]);
    const std::string problem =
        check_record(f.cluster.record(0), {Failure::timeout, Op::dispatch, Phase::payload, 1, 1, Argument::none, 1, 0}, 0);
    return problem.empty() ? check_waited(f.cluster.record(0)) : problem;
}

std::string aborted_between_halves() {
    Fixture f(Layout::flat);
    for (DispatchArgs& a : f.dispatches) a.part = static_cast<i32>(Part::begin);
    f.dispatch_all();
    f.cluster.host_word(0) = abort_word(Failure::peer_lost, 2);
    f.dispatches[0].part = static_cast<i32>(Part::end);
    host::dispatch(f.dispatches[0]);
    return check_record(f.cluster.record(0), {Failure::peer_lost, Op::dispatch, Phase::header, 2, 1}, 0);
}

// The rows of a dispatch are repeated, but rank 2 does so otherwise: the second half has nothing to wait for.
std::string end_of_invalid() {
    Fixture f(Layout::batched, kShort);
    f.dispatch_all();
    for (i32 rank = 0; rank < kRanks; ++rank) {
        f.dispatches[rank].repeat = 1;
        f.dispatches[rank].part = static_cast<i32>(Part::begin);
        f.dispatches[rank].call += rank == 2;
    }
    f.dispatch_all();
    for (i32 rank = 0; rank < kRanks; ++rank) {
        const std::string problem =
            check_record(f.cluster.record(rank), {Failure::mismatch, Op::dispatch, Phase::header, rank == 2 ? 0 : 2, 2}, rank);
        if (!problem.empty()) return problem;
        if (f.state(rank).last_dispatch != 0) return "a void round counts as a dispatch";
        f.dispatches[rank].part = static_cast<i32>(Part::end);
    }
    f.cluster.clear_records();
    f.dispatch_all();
    for (i32 rank = 0; rank < kRanks; ++rank) {
        if (f.cluster.record(rank).code != 0) return "the second half: " + text(f.cluster.record(rank));
        if (f.state(rank).round != 2) return "the second half counts";
    }
    return f.go_on();
}

std::string slow_reader() {
    Fixture f(Layout::expert, kShort);
    f.dispatch_all();
    f.state(0).last_combine = round_tag(1);  // as if round 1 had been a combine, which ranks 0 and 2 have read
    for (i32 rank : {0, 2}) f.word(0, drained_at(f.cluster.window, rank)) = tag_signal(round_tag(1));
    host::combine(f.combines[0]);
    return check_record(f.cluster.record(0), {Failure::timeout, Op::combine, Phase::drained, 1, 2, Argument::none, 1, 0}, 0);
}

std::string bad_id(Layout layout, i64 id) {
    Fixture f(layout);
    Input& sent = f.scenario.steps[0].dispatch->input[1];
    const size_t entry = sent.ids.size() - 1;
    const i64 good = sent.ids[entry];
    sent.ids[entry] = id;
    sent.ids32[entry] = static_cast<i32>(id);
    f.dispatch_all();
    sent.ids[entry] = good;
    sent.ids32[entry] = static_cast<i32>(good);
    return check_invalid_everywhere(
        f, {Failure::bad_input, Op::dispatch, Phase::header, 1, 1, Argument::topk_idx, f.scenario.shape.slots, id});
}

// A rank that does not know yet that a dispatch was void combines what it should have brought: nothing.
std::string combine_of_invalid() {
    Fixture f(Layout::expert);
    f.dispatches[2].call += 1;
    f.dispatch_all();
    f.cluster.clear_records();
    f.cluster.run([&](i32 rank) { host::combine(f.combines[rank]); });
    const Step& step = f.scenario.steps[1];
    Expected expected;
    Routed& nothing = expected[step.combine->routed];
    for (const Input& input : step.combine->routed->input) {
        nothing.slot.emplace_back(input.tokens * kRanks, -1);
        nothing.owner.emplace_back(input.ids.size(), -1);
    }
    for (i32 rank = 0; rank < kRanks; ++rank) {
        const std::string problem = check_step(f.cluster, step, expected, rank);
        if (!problem.empty()) return problem;
    }
    return "";
}

std::string nan_weight() {
    Fixture f(Layout::expert);
    Input& sent = f.scenario.steps[0].dispatch->input[2];
    const float good = sent.weights.back();
    sent.weights.back() = NAN;
    f.dispatch_all();
    sent.weights.back() = good;
    return check_invalid_everywhere(f, {Failure::bad_input, Op::dispatch, Phase::header, 2, 1, Argument::topk_weights});
}

std::string too_many_rows(Layout layout) {
    Fixture f(layout);
    const i32 needed = static_cast<i32>(rows_needed(f.scenario.shape, *f.scenario.steps[0].dispatch, 1));
    f.dispatches[1].max_rows = needed - 1;
    f.dispatch_all();
    const i32 groups = layout == Layout::batched ? experts_of(f.scenario.shape, 1).count : 1;
    const Want want{Failure::bad_input, Op::dispatch, Phase::header, 1, 1, Argument::max_rows, (needed - 1) / groups, needed / groups};
    return check_invalid_everywhere(f, want);
}

// Every token names one expert with all its entries.
std::string too_many_of_one_expert() {
    Fixture f(Layout::batched);
    const Shape& s = f.scenario.shape;
    std::vector<i64> ids(static_cast<size_t>(s.max_tokens) * s.topk, 0);
    std::vector<i32> ids32(ids.size(), 0);
    std::vector<float> weights(ids.size(), 1.0f);
    for (DispatchArgs& a : f.dispatches) {
        a.max_rows = s.slots * s.max_tokens;
        a.topk_idx = reinterpret_cast<u64>(a.idx_bytes == 8 ? static_cast<void*>(ids.data()) : ids32.data());
        a.topk_weights = reinterpret_cast<u64>(weights.data());
    }
    i64 count = 0;
    for (const Input& sent : f.scenario.steps[0].dispatch->input) count += static_cast<i64>(sent.tokens) * s.topk;
    f.dispatch_all();
    return check_invalid_everywhere(
        f, {Failure::bad_input, Op::dispatch, Phase::header, 0, 1, Argument::batched, s.ranks * s.max_tokens, count});
}

std::string other_operation() {
    Fixture f(Layout::expert);
    for (ReceiveBuffer& l : f.scenario.steps[0].dispatch->receive_buffer) std::fill_n(l.sent.begin(), kRanks, SourceTokens{0, 1});
    host::seal(host::tables_of(f.combines[0]));
    f.cluster.run([&](i32 rank) { rank == 0 ? host::combine(f.combines[rank]) : host::dispatch(f.dispatches[rank]); });
    std::string problem = check_record(f.cluster.record(0), {Failure::mismatch, Op::combine, Phase::header, 1, 1}, 0);
    for (i32 rank : {1, 2}) {
        if (problem.empty()) problem = check_record(f.cluster.record(rank), {Failure::mismatch, Op::dispatch, Phase::header, 0, 1}, rank);
        if (problem.empty()) problem = check_invalid(f, rank);
    }
    return problem.empty() ? f.go_on() : problem;
}

std::string other_settings() {
    Fixture f(Layout::expert);
    f.dispatches[2].call += 1;
    f.dispatch_all();
    std::string problem = check_failure(f, 2, {Failure::mismatch, Op::dispatch, Phase::header, 2, 1});
    for (i32 rank = 0; rank < kRanks && problem.empty(); ++rank) problem = check_invalid(f, rank);
    return problem.empty() ? f.go_on() : problem;
}

// All ranks make the same call, rank 1 with the handle of another dispatch.
std::string other_dispatch(bool repeat) {
    Fixture f(Layout::expert);
    f.dispatch_all();
    round_of(f.dispatches[1].route, kRanks) = 99;
    for (DispatchArgs& a : f.dispatches) a.repeat = 1;
    f.cluster.run([&](i32 rank) { repeat ? host::dispatch(f.dispatches[rank]) : host::combine(f.combines[rank]); });
    const Op op = repeat ? Op::dispatch : Op::combine;
    const std::string problem = check_failure(f, 1, {Failure::mismatch, op, Phase::header, 1, 2, Argument::handle, round_tag(1), 99});
    return problem.empty() ? f.go_on() : problem;
}

// The same, but for what rank 1 has of it: no bytes of a dispatch, or one number of another.
std::string changed_tables(bool repeat, bool nothing) {
    Fixture f(Layout::expert);
    f.dispatch_all();
    ReceiveBuffer& l = f.scenario.steps[0].dispatch->receive_buffer[1];
    if (nothing) std::fill_n(l.sent.begin(), l.sent.size(), SourceTokens{0, 0});
    if (!nothing) l.token_rows[0] ^= 1;
    for (DispatchArgs& a : f.dispatches) a.repeat = 1;
    f.cluster.run([&](i32 rank) { repeat ? host::dispatch(f.dispatches[rank]) : host::combine(f.combines[rank]); });
    const Op op = repeat ? Op::dispatch : Op::combine;
    std::string problem;
    for (i32 rank = 0; rank < kRanks && problem.empty(); ++rank)
        problem = check_record(
            f.cluster.record(rank),
            {Failure::bad_input, op, Phase::header, 1, 2, Argument::handle, f.scenario.shape.slots, nothing ? 0 : round_tag(1)}, rank);
    return problem.empty() ? f.go_on() : problem;
}

// Somebody sets a word of rank 0 while ranks 0 and 1 wait for rank 2.
std::string abort_while_waiting(bool host_word) {
    Fixture f(Layout::flat);
    f.cluster.run([&](i32 rank) {
        if (rank != 2) return host::dispatch(f.dispatches[rank]);
        const u64 words = neighbors != 0 ? signal_at(f.cluster.window, tagged_words_signal(0))
                                         : tagged_words_at(f.cluster.window, kRanks, round_tag(1), 0);
        const u64* header = &f.word(2, words);
        const u32 never = 0;
        wait_until({patience, &never, &never}, [&] { return signal_tag(load_acquire(header)) != 0; });
        compare_exchange(host_word ? &f.cluster.host_word(0) : f.cluster.abort_word(0), 0, abort_word(Failure::peer_lost, 2));
    });
    for (i32 rank : {0, 1}) {
        const FailureRecord& r = f.cluster.record(rank);
        const std::string problem = check_record(r, {Failure::peer_lost, Op::dispatch, Phase::header, 2, 1}, rank);
        if (!problem.empty()) return problem;
        if (r.waited_ns > patience / 2) return "the abort word did not end the wait";
    }
    return "";
}

std::string aborted_before() {
    Fixture f(Layout::flat);
    for (i32 rank = 0; rank < kRanks; ++rank) {
        *f.cluster.abort_word(rank) = abort_word(Failure::aborted, -1);
        f.dispatches[rank].ctx.abort_host = 0;  // no word of the host
    }
    f.dispatch_all();
    for (i32 rank = 0; rank < kRanks; ++rank) {
        const std::string problem = check_record(f.cluster.record(rank), {Failure::aborted, Op::dispatch, Phase::header, -1, 1}, rank);
        if (!problem.empty()) return problem;
    }
    return "";
}

std::string first_record_stays() {
    Fixture f(Layout::expert);
    f.cluster.record(0).code = static_cast<u32>(Failure::aborted);
    f.cluster.record(0).round = 99;
    f.dispatches[1].call += 1;
    f.dispatch_all();
    return f.cluster.record(0).code == static_cast<u32>(Failure::aborted) && f.cluster.record(0).round == 99 ? "" : "it was overwritten";
}

std::string left_the_group() {
    Fixture f(Layout::expert);
    f.cluster.run([&](i32 rank) { rank == 1 ? host::leave(f.cluster.context(1)) : host::dispatch(f.dispatches[rank]); });
    for (i32 rank : {0, 2}) {
        const std::string problem = check_record(f.cluster.record(rank), {Failure::peer_lost, Op::dispatch, Phase::header, 1, 1}, rank);
        if (!problem.empty()) return problem;
        // All words that a peer on a CPU waits for.
        for (i32 w = 0; w < kHeaderWords + f.cluster.window.columns; ++w)
            if (signal_tag(f.word(rank, tagged_words_at(f.cluster.window, kRanks, round_tag(1), 1) + w * sizeof(u64))) != round_tag(1))
                return "a word of mail is missing";
    }
    return "";
}

}  // namespace

int run_failure_cases(u64 timeout_ns, bool until_one, bool several_domains) {
    patience = timeout_ns;
    neighbors = several_domains ? 1 : 0;
    const struct {
        const char* name;
        std::function<std::string()> run;
        bool by_hand;  // writes what a peer would have written, which in several domains is the business of links
    } cases[] = {
        {"a rank never calls dispatch", absent_from_dispatch, false},
        {"a rank never calls combine", absent_from_combine, false},
        {"the first word of mail is missing", [] { return word_missing(0); }, true},
        {"a word of a notice is missing", [] { return word_missing(kHeaderWords - 1); }, true},
        {"a count is missing", [] { return word_missing(kHeaderWords + 2); }, true},
        {"a rank announces and sends nothing", silent_after_header, true},
        {"a rank announces and reduces nothing", silent_reducer, true},
        {"a rank announces and pulls nothing", silent_source_rank, true},
        {"a rank begins and sends nothing", silent_after_begin, true},
        {"aborted between the halves", aborted_between_halves, false},
        {"end of a void dispatch", end_of_invalid, false},
        {"a rank never finishes reading", slow_reader, true},
        {"id too large", [] { return bad_id(Layout::expert, 1000); }, false},
        {"id below -1", [] { return bad_id(Layout::flat, -2); }, false},
        {"id beyond the last", [] { return bad_id(Layout::batched, Fixture::find(Layout::batched).shape.slots); }, false},
        {"combine of a void dispatch", combine_of_invalid, false},
        {"NaN weight", nan_weight, false},
        {"too many flat rows", [] { return too_many_rows(Layout::flat); }, false},
        {"too many expert rows", [] { return too_many_rows(Layout::expert); }, false},
        {"too many batched rows", [] { return too_many_rows(Layout::batched); }, false},
        {"too many tokens of one expert", too_many_of_one_expert, false},
        {"another operation", other_operation, false},
        {"other settings", other_settings, false},
        {"combine of another dispatch", [] { return other_dispatch(false); }, false},
        {"repeat of another dispatch", [] { return other_dispatch(true); }, false},
        {"combine of no dispatch", [] { return changed_tables(false, true); }, false},
        {"repeat of no dispatch", [] { return changed_tables(true, true); }, false},
        {"combine of a changed handle", [] { return changed_tables(false, false); }, false},
        {"repeat of a changed handle", [] { return changed_tables(true, false); }, false},
        {"abort word here", [] { return abort_while_waiting(false); }, false},
        {"abort word of the host", [] { return abort_while_waiting(true); }, false},
        {"aborted before", aborted_before, false},
        {"the first record stays", first_record_stays, false},
        {"a rank left", left_the_group, false},
    };
    int failed = 0;
    for (const auto& c : cases) {
        if (c.by_hand && neighbors != 0) continue;
        const std::string problem = c.run();
        std::printf("%s: %s\n", c.name, problem.empty() ? "ok" : problem.c_str());
        failed += !problem.empty();
        if (until_one && failed != 0) break;
    }
    return failed;
}

}  // namespace moecomm::test
