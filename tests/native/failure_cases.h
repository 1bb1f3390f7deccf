// Rounds that fail, and what they must leave behind.
#pragma once

namespace moecomm::test {

// Runs them all; prints what is wrong and returns how many are.
int run_failure_cases();

}  // namespace moecomm::test
