// Makes small random cases of a few rounds in every interleaving of their ranks, and compares every byte with the oracle each time.
//
//   interleavings [--cases N] [--seed S]
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "../compare.h"
#include "explorer.h"

namespace moecomm::test {

namespace {

// A third rank would have too many states.
constexpr i32 kRanks = 2, kTokens = 2, kExperts = 4;
constexpr size_t kSteps = 5, kMostStates = 10'000'000;

// A case, and the windows of one run of it.
struct Run {
    Scenario scenario;
    std::unique_ptr<Cluster> cluster;
};

Run make_run(u64 seed) {
    Random random(seed);
    Limits limits;
    limits.fixed_ranks = kRanks;
    limits.fixed_tokens = kTokens;
    limits.workers = 1;
    Run run{random_scenario(random, limits), nullptr};
    run.cluster = std::make_unique<Cluster>(run.scenario.shape, 1);
    begin_near_wrap(*run.cluster, seed);
    place_outputs(run.scenario, *run.cluster);
    return run;
}

bool is_small(const Scenario& scenario) { return scenario.shape.slots <= kExperts && scenario.steps.size() <= kSteps; }

std::string explore(u64 seed, size_t& states, size_t& runs) {
    Run run;
    Explorer explorer(kRanks,
                      {[&] {
                           run = make_run(seed);
                           std::vector<Region> regions;
                           for (i32 rank = 0; rank < kRanks; ++rank)
                               regions.push_back({run.cluster->base(rank), run.cluster->window.bytes});
                           return regions;
                       },
                       [&](i32 rank) {
                           for (const Step& step : run.scenario.steps) run_step(*run.cluster, step, rank);
                       },
                       [&] { return check_steps(*run.cluster, run.scenario); }},
                      kMostStates);
    const std::string problem = explorer.explore();
    states += explorer.states();
    runs += explorer.runs();
    return problem;
}

}  // namespace

int main(int argc, char** argv) {
    u64 cases = 1, seed = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string flag = argv[i];
        const u64 value = std::strtoull(argv[i + 1], nullptr, 10);
        if (flag == "--cases") cases = value;
        if (flag == "--seed") seed = value;
    }
    size_t states = 0, runs = 0;
    for (u64 done = 0; done < cases; ++seed) {
        if (!is_small(make_run(seed).scenario)) continue;
        const std::string problem = explore(seed, states, runs);
        ++done;
        if (problem.empty()) continue;
        std::printf("seed %llu: %s\n", seed, problem.c_str());
        return 1;
    }
    std::printf("%llu cases, %zu states, %zu runs agree with the oracle\n", cases, states, runs);
    return 0;
}

}  // namespace moecomm::test

int main(int argc, char** argv) { return moecomm::test::main(argc, argv); }
