// Runs random rounds on ranks that are threads, and compares every byte with the oracle.  One seed is one case.
//
//   round_driver [--cases N] [--seed S] [--ranks R] [--domains] [--orderly] [--workers W] [--timeout-ms T] [--failures [--until-one]]
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "compare.h"
#include "failure_cases.h"

namespace moecomm::test {

namespace {

void run_rank(const Cluster& cluster, const Scenario& scenario, u64 seed, i32 rank) {
    Random jitter(seed * 64 + rank);
    for (const Step& step : scenario.steps) {
        for (i32 i = jitter.once_in(3) ? jitter.between(1, 3) : 0; i > 0; --i) std::this_thread::yield();
        run_step(cluster, step, rank);
    }
}

std::string run_case(u64 seed, const Limits& limits, u64 timeout_ns, bool disorder) {
    Random random(seed);
    const Scenario scenario = random_scenario(random, limits);
    Cluster cluster(scenario.shape, timeout_ns, disorder ? seed : 0);
    begin_near_wrap(cluster, seed);
    place_outputs(scenario, cluster);
    cluster.run([&](i32 rank) { run_rank(cluster, scenario, seed, rank); });
    return check_steps(cluster, scenario);
}

}  // namespace

int main(int argc, char** argv) {
    u64 cases = 100, seed = 1, timeout_ns = 20'000'000'000;
    bool failures = false, until_one = false, disorder = true;
    Limits limits;
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        if (flag == "--failures" || flag == "--until-one") {
            (flag == "--failures" ? failures : until_one) = true;
            continue;
        }
        if (flag == "--domains" || flag == "--orderly") {
            (flag == "--domains" ? limits.several_domains : disorder) = flag == "--domains";
            continue;
        }
        const u64 value = i + 1 < argc ? std::strtoull(argv[++i], nullptr, 10) : 0;
        if (flag == "--cases") cases = value;
        if (flag == "--seed") seed = value;
        if (flag == "--ranks") limits.fixed_ranks = static_cast<i32>(value);
        if (flag == "--timeout-ms") timeout_ns = value * 1'000'000;
        if (flag == "--workers") limits.workers = static_cast<i32>(value);
    }
    if (failures) return run_failure_cases(timeout_ns, until_one, limits.several_domains);
    for (u64 last = seed + cases; seed < last; ++seed) {
        const std::string problem = run_case(seed, limits, timeout_ns, disorder);
        if (problem.empty()) continue;
        std::printf("seed %llu: %s\n", seed, problem.c_str());
        return 1;
    }
    std::printf("%llu cases agree with the oracle\n", cases);
    return 0;
}

}  // namespace moecomm::test

int main(int argc, char** argv) { return moecomm::test::main(argc, argv); }
