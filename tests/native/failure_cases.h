// Rounds that fail, and what they must leave behind.
#pragma once
#include "protocol/compiler.h"

namespace moecomm::test {

// Runs them all, or until one is wrong; prints what is wrong and returns how many are.  Waits that are not meant to expire end after
// `timeout_ns`.
int run_failure_cases(u64 timeout_ns, bool until_one, bool several_domains);

}  // namespace moecomm::test
