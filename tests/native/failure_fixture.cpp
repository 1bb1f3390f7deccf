#include "failure_fixture.h"

#include <utility>

#include "host/executor.h"

namespace moecomm::test {

u64 patience = 0;
i32 neighbors = 0;

namespace {

template <class T>
bool all_are(const std::vector<T>& values, T value) {
    for (const T& v : values)
        if (v != value) return false;
    return true;
}

}  // namespace

Fixture::Fixture(Layout layout, u64 timeout_ns) : scenario(find(layout)), cluster(scenario.shape, timeout_ns) {
    place_outputs(scenario, cluster);
    for (i32 rank = 0; rank < kRanks; ++rank) {
        dispatches.push_back(dispatch_args(cluster, *scenario.steps[0].dispatch, rank));
        combines.push_back(combine_args(cluster, *scenario.steps[1].combine, rank));
    }
}

Scenario Fixture::find(Layout layout) {
    for (u64 seed = 1;; ++seed) {
        Random random(seed);
        Scenario s = random_scenario(random, {kRanks, kRanks, 2, kTokens, false, neighbors});
        bool good = s.steps.size() >= 2 && s.steps[0].dispatch->layout == layout && s.steps[0].part == Part::whole;
        good = good && s.steps[1].combine != nullptr && s.shape.ring_tokens < kTokens;
        for (const Input& sent : s.steps[0].dispatch->input) good = good && sent.tokens > 0 && sent.ids[0] >= 0;
        size_t entries = 0;
        for (const Input& sent : s.steps[0].dispatch->input) entries += sent.ids.size();
        good = good && entries > kRanks * kTokens;
        for (const ReceiveBuffer& receive_buffer : s.steps[0].dispatch->receive_buffer) good = good && receive_buffer.max_rows > 1;
        for (const Input& sent : s.steps[0].dispatch->input) good = good && !sent.weights.empty();
        if (good) return s;
    }
}

void Fixture::dispatch_all() {
    cluster.run([&](i32 rank) { host::dispatch(dispatches[rank]); });
}

std::string Fixture::go_on() {
    cluster.clear_records();
    for (i32 rank = 0; rank < kRanks; ++rank) dispatches[rank] = dispatch_args(cluster, *scenario.steps[0].dispatch, rank);
    cluster.run([&](i32 rank) {
        host::dispatch(dispatches[rank]);
        place_rows(cluster, *scenario.steps[1].combine, rank);
        host::combine(combines[rank]);
    });
    Expected expected;
    for (i32 step = 0; step < 2; ++step) {
        for (i32 rank = 0; rank < kRanks; ++rank) {
            const std::string problem = check_step(cluster, scenario.steps[step], expected, rank);
            if (!problem.empty()) return "the next round: " + problem;
        }
    }
    return "";
}

std::string check_record(const FailureRecord& r, const Want& w, i32 rank) {
    const bool same = r.code == static_cast<u32>(w.code) && r.op == static_cast<u32>(w.op) && r.phase == static_cast<u32>(w.phase) &&
                      r.peer == w.peer && r.round == w.round && r.argument == static_cast<u32>(w.argument) && r.rank == rank &&
                      (w.expected == kAny || r.expected == w.expected) && (w.seen == kAny || r.seen == w.seen);
    return same ? "" : "rank " + std::to_string(rank) + " has the record: " + text(r);
}

std::string check_failure(Fixture& f, i32 other, const Want& want) {
    for (i32 rank = 0; rank < kRanks; ++rank) {
        Want here = want;
        if (rank == other) {
            here.peer = other == 0 ? 1 : 0;
            std::swap(here.expected, here.seen);
        }
        const std::string problem = check_record(f.cluster.record(rank), here, rank);
        if (!problem.empty()) return problem;
    }
    return "";
}

std::string check_waited(const FailureRecord& r) {
    return r.waited_ns >= kShort && r.waited_ns < kShort + 2'000'000'000 ? "" : "waited " + std::to_string(r.waited_ns) + " ns";
}

std::string check_invalid(Fixture& f, i32 rank) {
    const Dispatched& d = *f.scenario.steps[0].dispatch;
    const ReceiveBuffer& l = d.receive_buffer[rank];
    for (i64 i = 0; i < static_cast<i64>(l.max_rows) * d.row_bytes; ++i)
        if (f.cluster.base(rank)[l.x + i] != kUntouched) return "payload moved in a void round";
    bool empty = all_are(l.token_rows, -1) && all_are(l.token_slot, -1) && all_are(l.tokens_per_expert, 0) &&
                 all_are<i64>(l.rows_per_expert, 0) && l.num_rows[0] == 0;
    for (i32 p = 0; p < kRanks; ++p) empty = empty && l.sent[p].num_tokens == 0 && l.sent[p].chunk_tokens == 1;
    if (!empty) return "a void round left rows behind";
    if (round_of(f.dispatches[rank].route, kRanks) != round_tag(1)) return "the route of a void round has no round";
    if (f.state(rank).last_dispatch != 0) return "a void round counts as a dispatch";
    return f.state(rank).round == 1 ? "" : "a void round does not count";
}

std::string check_invalid_everywhere(Fixture& f, const Want& want) {
    for (i32 rank = 0; rank < kRanks; ++rank) {
        std::string problem = check_record(f.cluster.record(rank), want, rank);
        if (problem.empty()) problem = check_invalid(f, rank);
        if (!problem.empty()) return problem;
    }
    return f.go_on();
}

}  // namespace moecomm::test
