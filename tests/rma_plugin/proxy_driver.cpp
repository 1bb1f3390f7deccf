// driver <plugin> <scenario>[-variant] [name=value ...]: exit status 0 if what was to happen happened.
#include <cstdlib>
#include <map>

#include "scenarios.h"

namespace {

const std::map<std::string, Scenario*> kScenarios = {
    {"random", random_case},
    {"killed", killed},
    {"silent", silent},
    {"absent", absent},
    {"elsewhere", elsewhere},
    {"left", left},
    {"again", again},
    {"misuse", misuse},
    {"strangers", strangers},
    {"no_descriptors", no_descriptors},
    {"no_descriptor_for_window", no_descriptor_for_window},
    {"crowded", crowded},
    {"half_registered", half_registered},
    {"late", late_signal},
    {"copied_into", copied_into},
    {"liar", liar},
};

void set(Options& options, const std::string& name, const std::string& value) {
    const std::map<std::string, int*> numbers = {
        {"ranks", &options.ranks}, {"epochs", &options.epochs}, {"contexts", &options.contexts}, {"ops", &options.ops},
        {"queue", &options.queue}, {"table", &options.table},   {"seconds", &options.seconds},   {"lag", &options.lag}};
    if (numbers.count(name) == 1) {
        *numbers.at(name) = std::atoi(value.c_str());
    } else if (name == "slice" || name == "seed") {
        (name == "slice" ? options.slice : options.seed) = std::strtoull(value.c_str(), nullptr, 10);
    } else if (name == "mode") {
        options.mode = value;
    } else {
        give_up("unknown option " + name);
    }
}

}  // namespace

int main(int count, char** words) {
    require(count >= 3, "driver <plugin> <scenario>[-variant] [name=value ...]");
    Options options;
    options.plugin = words[1];
    const std::string name = words[2];
    const size_t dash = std::min(name.find('-'), name.size());
    options.scenario = name.substr(0, dash);
    options.variant = name.substr(std::min(dash + 1, name.size()));
    for (int i = 3; i < count; ++i) {
        const std::string word = words[i];
        const size_t equals = std::min(word.find('='), word.size() - 1);
        set(options, word.substr(0, equals), word.substr(equals + 1));
    }
    require(kScenarios.count(options.scenario) == 1, "unknown scenario " + options.scenario);
    World world(options);
    Scenario& scenario = *kScenarios.at(options.scenario);
    const int dies = options.scenario == "killed" ? 1 : -1;
    return world.run([&](int rank) { return scenario(options, world, rank); }, dies) ? 0 : 1;
}
