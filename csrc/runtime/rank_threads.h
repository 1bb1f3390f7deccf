// Several ranks of one process in the same round.
#pragma once
#include <functional>
#include <vector>

namespace moecomm::runtime {

// Runs every job in a thread of its own, the last one in the calling thread, all at once.  Returns when all have returned, and then
// throws the first exception in job order, if there was one.
void run_on_threads(const std::vector<std::function<void()>>& jobs);

}  // namespace moecomm::runtime
