// The windows against the oracle.
#pragma once
#include <map>
#include <string>

#include "oracle.h"

namespace moecomm::test {

using Expected = std::map<const Dispatched*, Routed>;  // filled as dispatches are checked

// Return the first error of `rank` in a step, or "".  The dispatch that a combine goes back to must have been checked before.
std::string check_step(Cluster& cluster, const Step& step, Expected& expected, i32 rank);

// Return the first error of any rank in any step, or "".
std::string check_steps(Cluster& cluster, const Scenario& scenario);

std::string text(const FailureRecord& record);

}  // namespace moecomm::test
