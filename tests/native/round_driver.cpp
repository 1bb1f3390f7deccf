// Runs random rounds on ranks that are threads, and compares every byte with the oracle.  One seed is one case.
//
//   round_driver [--cases N] [--seed S] [--ranks R] [--workers W] [--failures]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>

#include "failure_cases.h"
#include "host/executor.h"
#include "numbers.h"
#include "oracle.h"

namespace moecomm::test {

namespace {

constexpr u64 kTimeout = 2'000'000'000;

// What differed, or "".
std::string compare_bytes(const char* name, const u8* got, const std::vector<u8>& want) {
    for (size_t i = 0; i < want.size(); ++i)
        if (got[i] != want[i]) return std::string(name) + " differs at byte " + std::to_string(i);
    for (size_t i = want.size(); i < want.size() + Cluster::kGuard; ++i)
        if (got[i] != kUntouched) return std::string(name) + " was written behind its end";
    return "";
}

template <class T>
std::string compare_values(const char* name, const std::vector<T>& got, const std::vector<T>& want) {
    for (size_t i = 0; i < want.size(); ++i)
        if (std::memcmp(&got[i], &want[i], sizeof(T)) != 0) return std::string(name) + " differs at " + std::to_string(i);
    return got.size() == want.size() ? "" : std::string(name) + " has another size";
}

// Bit for bit, but one NaN is as good as another.
std::string compare_floats(const std::vector<u8>& got, const std::vector<u8>& want, Type type, i64 stride, i32 hidden) {
    for (size_t row = 0; row * stride < want.size(); ++row) {
        const u8 *g = &got[row * stride], *w = &want[row * stride];
        for (i32 i = 0; i < hidden; ++i) {
            if (std::memcmp(g + i * size_of(type), w + i * size_of(type), size_of(type)) == 0) continue;
            if (std::isnan(value_at(g, type, i)) && std::isnan(value_at(w, type, i))) continue;
            return "out differs at token " + std::to_string(row) + ", column " + std::to_string(i);
        }
        const i64 used = hidden * size_of(type);
        if (std::memcmp(g + used, w + used, stride - used) != 0) return "out was written between its rows";
    }
    return "";
}

std::string first_of(std::initializer_list<std::string> problems) {
    for (const std::string& problem : problems)
        if (!problem.empty()) return problem;
    return "";
}

std::string check_dispatch(const Cluster& cluster, const Dispatched& d, const Routed& want, i32 rank) {
    const Landing& l = d.landing[rank];
    const Arrived& a = want.arrived[rank];
    const u8* base = cluster.base(rank);
    const std::string payload = first_of({compare_bytes("x", base + l.x, a.x), compare_bytes("scales", base + l.scales, a.scales)});
    if (d.repeats != nullptr || !payload.empty()) return payload;
    return first_of({
        compare_bytes("src", base + l.src, a.src),
        compare_bytes("weights", base + l.weights, a.weights),
        l.topk_idx != 0 ? compare_bytes("topk_idx", base + l.topk_idx, a.topk_idx) : "",
        l.rows != 0 ? compare_bytes("rows", base + l.rows, a.rows) : "",
        compare_values("tokens_per_expert", l.tokens_per_expert, a.tokens_per_expert),
        compare_values("num_rows", l.num_rows, {a.num_rows}),
        compare_values("source_base", l.source_base, a.source_base),
        compare_values("slot_base", l.slot_base, want.base[rank]),
        compare_values("token_rows", l.token_rows, want.row[rank]),
        compare_values("token_owner", l.token_owner, want.owner[rank]),
        compare_values("token_slot", l.token_slot, want.slot[rank]),
    });
}

std::string check_combine(const Shape& shape, const Combined& c, const Routed& routed, i32 rank) {
    const Home want = expect_combine(shape, c, routed, rank);
    const Combined::Part& part = c.parts[rank];
    const std::string out = compare_floats(part.out, want.out, c.type, part.out_stride, c.routed->hidden);
    return first_of({out, compare_values("weight grads", part.out_grads, want.grads)});
}

void run_rank(const Cluster& cluster, const Scenario& scenario, u64 seed, i32 rank) {
    Random jitter(seed * 64 + rank);
    for (const Step& step : scenario.steps) {
        for (i32 i = jitter.once_in(3) ? jitter.between(1, 3) : 0; i > 0; --i) std::this_thread::yield();
        if (step.dispatch != nullptr) host::dispatch(dispatch_args(cluster, *step.dispatch, rank));
        if (step.combine != nullptr) host::combine(combine_args(cluster, *step.combine, rank));
    }
}

std::string check_step(Cluster& cluster, const Step& step, std::map<const Dispatched*, Routed>& routed, i32 rank) {
    const FailureRecord& record = cluster.record(rank);
    if (record.code != 0)
        return "failed: code " + std::to_string(record.code) + " seen " + std::to_string(record.seen) + " op " + std::to_string(record.op) + " phase " +
               std::to_string(record.phase) + " peer " + std::to_string(record.peer) + " round " + std::to_string(record.round);
    if (step.combine != nullptr) return check_combine(cluster.shape, *step.combine, routed.at(step.combine->routed), rank);
    if (routed.count(step.dispatch) == 0) routed[step.dispatch] = expect_dispatch(cluster.shape, *step.dispatch);
    return check_dispatch(cluster, *step.dispatch, routed.at(step.dispatch), rank);
}

std::string run_case(u64 seed, const Limits& limits) {
    if(getenv("V"))printf("seed %llu\n",seed),fflush(stdout);
    Random random(seed);
    const Scenario scenario = random_scenario(random, limits);
    Cluster cluster(scenario.shape, kTimeout);
    place_outputs(scenario, cluster);
    cluster.run([&](i32 rank) { run_rank(cluster, scenario, seed, rank); });
    if(getenv("V")) for (i32 r=0;r<scenario.shape.ranks;++r){auto&x=cluster.record(r);printf("rank %d code %u op %u phase %u peer %d round %u exp %lld seen %lld\n",r,x.code,x.op,x.phase,x.peer,x.round,x.expected,x.seen);}
    std::map<const Dispatched*, Routed> routed;
    for (size_t i = 0; i < scenario.steps.size(); ++i) {
        for (i32 rank = 0; rank < scenario.shape.ranks; ++rank) {
            const std::string problem = check_step(cluster, scenario.steps[i], routed, rank);
            if (!problem.empty())
                return "round " + std::to_string(i + 1) + (scenario.steps[i].combine != nullptr ? " (combine)" : " (dispatch)") + " rank " +
                       std::to_string(rank) + " of " + std::to_string(scenario.shape.ranks) + ": " + problem;
        }
    }
    return "";
}

}  // namespace

int main(int argc, char** argv) {
    u64 cases = 100, seed = 1;
    bool failures = false;
    Limits limits;
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        if (flag == "--failures") {
            failures = true;
            continue;
        }
        const u64 value = i + 1 < argc ? std::strtoull(argv[++i], nullptr, 10) : 0;
        if (flag == "--cases") cases = value;
        if (flag == "--seed") seed = value;
        if (flag == "--ranks") limits.fixed_ranks = static_cast<i32>(value);
        if (flag == "--workers") limits.workers = static_cast<i32>(value);
    }
    if (failures) return run_failure_cases();
    for (u64 last = seed + cases; seed < last; ++seed) {
        const std::string problem = run_case(seed, limits);
        if (problem.empty()) continue;
        std::printf("seed %llu: %s\n", seed, problem.c_str());
        return 1;
    }
    std::printf("%llu cases agree with the oracle\n", cases);
    return 0;
}

}  // namespace moecomm::test

int main(int argc, char** argv) { return moecomm::test::main(argc, argv); }
