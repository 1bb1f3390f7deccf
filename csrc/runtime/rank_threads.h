// One round of several ranks in one process.
#pragma once
#include <functional>
#include <vector>

namespace moecomm::runtime {

// Run all jobs concurrently, the last in the calling thread and every other in a thread of its own.  Return when all have returned; then
// throw the first exception in job order, if any.
void run_on_threads(const std::vector<std::function<void()>>& jobs);

}  // namespace moecomm::runtime
