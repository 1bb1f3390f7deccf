#include "failure_cases.h"

#include <cmath>
#include <cstdio>

#include "failure_fixture.h"
#include "host/executor.h"
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
        if (problem.empty()) problem = check_record(r, {Failure::timeout, Op::dispatch, Phase::notice, 1, 1, Argument::none, 1, 0}, rank);
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
        const std::string problem = check_record(f.cluster.record(rank), {Failure::timeout, Op::combine, Phase::notice, 2, 2}, rank);
        if (!problem.empty()) return problem;
    }
    return "";
}

// Rank 1 is played by hand from here: it announces itself and then does nothing.
void announce_as_rank_1(Fixture& f, Op op, u32 round, i32 tokens, u64 call) {
    auto* n = reinterpret_cast<Notice*>(f.cluster.base(0) + notice_at(f.cluster.window, kRanks, round, 1));
    n->op = static_cast<u32>(op);
    n->call = call;
    n->num_tokens = tokens;
    n->chunk_tokens = kMinChunk;
    n->max_rows = 1 << 20;
    store_release(&n->tag, tag_signal(round));
}

// The same for rank 2, which has no tokens and is done at once.
void announce_as_others(Fixture& f, Op op, u32 round, i32 tokens, u64 call) {
    announce_as_rank_1(f, op, round, tokens, call);
    auto* one = reinterpret_cast<Notice*>(f.cluster.base(0) + notice_at(f.cluster.window, kRanks, round, 1));
    auto* two = reinterpret_cast<Notice*>(f.cluster.base(0) + notice_at(f.cluster.window, kRanks, round, 2));
    *two = *one;
    two->num_tokens = 0;
}

std::string silent_after_notice() {
    Fixture f(Layout::flat, kShort);
    DispatchArgs alone = f.dispatches[0];
    alone.num_tokens = 0;
    announce_as_others(f, Op::dispatch, 1, 9, alone.call);
    f.word(0, arrived_at(f.cluster.window, 1, 0)) = chunk_signal(1, 0, 0);
    host::dispatch(alone);  // rank 1 has a second chunk, and that never comes
    const std::string problem =
        check_record(f.cluster.record(0), {Failure::timeout, Op::dispatch, Phase::payload, 1, 1, Argument::none, 1, 0}, 0);
    return problem.empty() ? check_waited(f.cluster.record(0)) : problem;
}

std::string silent_reducer() {
    Fixture f(Layout::flat, kShort);
    f.dispatch_all();
    announce_as_others(f, Op::combine, 2, 0, f.combines[0].call);
    Landing& l = f.scenario.steps[0].dispatch->landing[0];
    for (size_t i = 0; i < l.token_slot.size(); ++i) l.token_slot[i] = i % kRanks == 1 ? 0 : -1;  // all our tokens went to rank 1
    l.slot_base.assign(kRanks, 0);
    host::combine(f.combines[0]);
    return check_record(f.cluster.record(0), {Failure::timeout, Op::combine, Phase::reduced, 1, 2, Argument::none, 2, 0}, 0);
}

std::string slow_reader() {
    Fixture f(Layout::expert, kShort);
    f.dispatch_all();
    f.state(0).last_combine = 1;  // as if round 1 had been a combine, which ranks 0 and 2 have read
    for (i32 rank : {0, 2}) f.word(0, drained_at(f.cluster.window, rank)) = tag_signal(1);
    host::combine(f.combines[0]);
    return check_record(f.cluster.record(0), {Failure::timeout, Op::combine, Phase::drained, 1, 2, Argument::none, 1, 0}, 0);
}

std::string bad_id(Layout layout, i64 id) {
    Fixture f(layout);
    Sent& sent = f.scenario.steps[0].dispatch->sent[1];
    const size_t entry = sent.ids.size() - 1;
    const i64 good = sent.ids[entry];
    sent.ids[entry] = id;
    sent.ids32[entry] = static_cast<i32>(id);
    f.dispatch_all();
    sent.ids[entry] = good;
    sent.ids32[entry] = static_cast<i32>(good);
    return check_void_everywhere(f,
                                 {Failure::bad_input, Op::dispatch, Phase::notice, 1, 1, Argument::topk_idx, f.scenario.shape.experts, id});
}

std::string nan_weight() {
    Fixture f(Layout::expert);
    Sent& sent = f.scenario.steps[0].dispatch->sent[2];
    const float good = sent.weights.back();
    sent.weights.back() = NAN;
    f.dispatch_all();
    sent.weights.back() = good;
    return check_void_everywhere(f, {Failure::bad_input, Op::dispatch, Phase::notice, 2, 1, Argument::topk_weights});
}

std::string too_many_rows(Layout layout) {
    Fixture f(layout);
    const i32 needed = static_cast<i32>(rows_needed(f.scenario.shape, *f.scenario.steps[0].dispatch, 1));
    f.dispatches[1].max_rows = needed - 1;
    f.dispatch_all();
    return check_void_everywhere(f, {Failure::bad_input, Op::dispatch, Phase::notice, 1, 1, Argument::max_rows, needed - 1, needed});
}

// Every token names one expert with all its entries.
std::string too_many_of_one_expert() {
    Fixture f(Layout::batched);
    const Shape& s = f.scenario.shape;
    std::vector<i64> ids(static_cast<size_t>(s.max_tokens) * s.topk, 0);
    std::vector<i32> ids32(ids.size(), 0);
    std::vector<float> weights(ids.size(), 1.0f);
    for (DispatchArgs& a : f.dispatches) {
        a.topk_idx = reinterpret_cast<u64>(a.idx_bytes == 8 ? static_cast<void*>(ids.data()) : ids32.data());
        a.topk_weights = reinterpret_cast<u64>(weights.data());
    }
    i64 count = 0;
    for (const Sent& sent : f.scenario.steps[0].dispatch->sent) count += static_cast<i64>(sent.tokens) * s.topk;
    if (count <= static_cast<i64>(s.ranks) * s.max_tokens) return "the case needs a larger topk";
    f.dispatch_all();
    return check_void_everywhere(f,
                                 {Failure::bad_input, Op::dispatch, Phase::notice, 0, 1, Argument::batched, s.ranks * s.max_tokens, count});
}

std::string other_operation() {
    Fixture f(Layout::expert);
    for (Landing& l : f.scenario.steps[0].dispatch->landing) l.source_base.assign(kRanks + 1, 0);
    f.cluster.run([&](i32 rank) { rank == 0 ? host::combine(f.combines[rank]) : host::dispatch(f.dispatches[rank]); });
    std::string problem = check_record(f.cluster.record(0), {Failure::mismatch, Op::combine, Phase::notice, 1, 1}, 0);
    for (i32 rank : {1, 2}) {
        if (problem.empty()) problem = check_record(f.cluster.record(rank), {Failure::mismatch, Op::dispatch, Phase::notice, 0, 1}, rank);
        if (problem.empty()) problem = check_void(f, rank);
    }
    return problem.empty() ? f.go_on() : problem;
}

std::string other_settings() {
    Fixture f(Layout::expert);
    f.dispatches[2].call += 1;
    f.dispatch_all();
    for (i32 rank = 0; rank < kRanks; ++rank) {
        std::string problem =
            check_record(f.cluster.record(rank), {Failure::mismatch, Op::dispatch, Phase::notice, rank == 2 ? 0 : 2, 1}, rank);
        if (problem.empty()) problem = check_void(f, rank);
        if (!problem.empty()) return problem;
    }
    return f.go_on();
}

// Somebody sets a word of rank 0 while ranks 0 and 1 wait for rank 2.
std::string abort_while_waiting(bool host_word) {
    Fixture f(Layout::flat);
    f.cluster.run([&](i32 rank) {
        if (rank != 2) return host::dispatch(f.dispatches[rank]);
        const u64* notice = &f.word(2, notice_at(f.cluster.window, kRanks, 1, 0));
        const u32 never = 0;
        wait_until({patience, &never, &never}, [&] { return signal_tag(load_acquire(notice)) == 1; });
        compare_exchange(host_word ? &f.cluster.host_word(0) : f.cluster.abort_word(0), 0, abort_word(Failure::peer_lost, 2));
    });
    for (i32 rank : {0, 1}) {
        const FailureRecord& r = f.cluster.record(rank);
        const std::string problem = check_record(r, {Failure::peer_lost, Op::dispatch, Phase::notice, 2, 1}, rank);
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
        const std::string problem = check_record(f.cluster.record(rank), {Failure::aborted, Op::dispatch, Phase::notice, -1, 1}, rank);
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
        const std::string problem = check_record(f.cluster.record(rank), {Failure::peer_lost, Op::dispatch, Phase::notice, 1, 1}, rank);
        if (!problem.empty()) return problem;
    }
    return "";
}

}  // namespace

int run_failure_cases(u64 timeout_ns) {
    patience = timeout_ns;
    const struct {
        const char* name;
        std::function<std::string()> run;
    } cases[] = {
        {"a rank never calls dispatch", absent_from_dispatch},
        {"a rank never calls combine", absent_from_combine},
        {"a rank announces and sends nothing", silent_after_notice},
        {"a rank announces and reduces nothing", silent_reducer},
        {"a rank never finishes reading", slow_reader},
        {"id too large", [] { return bad_id(Layout::expert, 1000); }},
        {"id below -1", [] { return bad_id(Layout::flat, -2); }},
        {"id beyond the last", [] { return bad_id(Layout::batched, Fixture::find(Layout::batched).shape.experts); }},
        {"NaN weight", nan_weight},
        {"too many flat rows", [] { return too_many_rows(Layout::flat); }},
        {"too many expert rows", [] { return too_many_rows(Layout::expert); }},
        {"too many tokens of one expert", too_many_of_one_expert},
        {"another operation", other_operation},
        {"other settings", other_settings},
        {"abort word here", [] { return abort_while_waiting(false); }},
        {"abort word of the host", [] { return abort_while_waiting(true); }},
        {"aborted before", aborted_before},
        {"the first record stays", first_record_stays},
        {"a rank left", left_the_group},
    };
    int failed = 0;
    for (const auto& c : cases) {
        const std::string problem = c.run();
        std::printf("%s: %s\n", c.name, problem.empty() ? "ok" : problem.c_str());
        failed += !problem.empty();
    }
    return failed;
}

}  // namespace moecomm::test
