// Threads and chunk size of a round, by number of tokens.
#pragma once
#include <unordered_map>

#include "../protocol/compiler.h"

namespace moecomm::runtime {

struct Schedule {
    i32 workers, chunk_tokens;
};
using Schedules = std::unordered_map<i32, Schedule>;  // by number of tokens

inline i32 workers_of(const Schedules& schedules, i32 num_tokens) {
    const auto found = schedules.find(num_tokens);
    return found == schedules.end() ? 0 : found->second.workers;
}

}  // namespace moecomm::runtime
