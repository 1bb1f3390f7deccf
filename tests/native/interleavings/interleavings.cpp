// Makes small random cases of a few rounds in every interleaving of their ranks, and compares every byte with the oracle each time.
//
//   interleavings [--cases N] [--seed S] [--ranks R] [--tokens T] [--experts E] [--steps S] [--most-states N]
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "../compare.h"
#include "explorer.h"

namespace moecomm::test {

namespace {

struct Asked {
    u64 cases = 1, seed = 1, most_states = 10'000'000;
    i32 ranks = 2, tokens = 2, experts = 4, steps = 5;
};

// A case, and the windows of one run of it.
struct Run {
    Scenario scenario;
    std::unique_ptr<Cluster> cluster;
};

Run make_run(const Asked& asked, u64 seed) {
    Random random(seed);
    Limits limits;
    limits.fixed_ranks = asked.ranks;
    limits.fixed_tokens = asked.tokens;
    limits.workers = 1;
    Run run{random_scenario(random, limits), nullptr};
    run.cluster = std::make_unique<Cluster>(run.scenario.shape, 1);
    begin_near_wrap(*run.cluster, seed);
    place_outputs(run.scenario, *run.cluster);
    return run;
}

bool is_small(const Asked& asked, const Scenario& scenario) {
    return scenario.shape.experts <= asked.experts && static_cast<i32>(scenario.steps.size()) <= asked.steps;
}

std::string explore(const Asked& asked, u64 seed, size_t& states, size_t& runs) {
    Run run;
    Explorer explorer(asked.ranks,
                      {[&] {
                           run = make_run(asked, seed);
                           std::vector<Region> regions;
                           for (i32 rank = 0; rank < asked.ranks; ++rank)
                               regions.push_back({run.cluster->base(rank), run.cluster->window.bytes});
                           return regions;
                       },
                       [&](i32 rank) {
                           for (const Step& step : run.scenario.steps) run_step(*run.cluster, step, rank);
                       },
                       [&] { return check_steps(*run.cluster, run.scenario); }},
                      asked.most_states);
    const std::string problem = explorer.explore();
    states += explorer.states();
    runs += explorer.runs();
    return problem;
}

}  // namespace

int main(int argc, char** argv) {
    Asked asked;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string flag = argv[i];
        const u64 value = std::strtoull(argv[i + 1], nullptr, 10);
        if (flag == "--cases") asked.cases = value;
        if (flag == "--seed") asked.seed = value;
        if (flag == "--most-states") asked.most_states = value;
        if (flag == "--ranks") asked.ranks = static_cast<i32>(value);
        if (flag == "--tokens") asked.tokens = static_cast<i32>(value);
        if (flag == "--experts") asked.experts = static_cast<i32>(value);
        if (flag == "--steps") asked.steps = static_cast<i32>(value);
    }
    size_t states = 0, runs = 0;
    u64 seed = asked.seed;
    for (u64 done = 0; done < asked.cases; ++seed) {
        if (!is_small(asked, make_run(asked, seed).scenario)) continue;
        const std::string problem = explore(asked, seed, states, runs);
        ++done;
        if (problem.empty()) continue;
        std::printf("seed %llu: %s\n", seed, problem.c_str());
        return 1;
    }
    std::printf("%llu cases, %zu states, %zu runs agree with the oracle\n", asked.cases, states, runs);
    return 0;
}

}  // namespace moecomm::test

int main(int argc, char** argv) { return moecomm::test::main(argc, argv); }
