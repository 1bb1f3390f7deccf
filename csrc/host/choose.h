// Slots of the entries of a dispatch by balanced replicas: protocol/placement.h, kBalanced.
#pragma once
#include "dispatch.h"

namespace moecomm::host {

// Exchange with all ranks how many entries go to each expert, and choose the slots of this rank's.  False if the round has failed.  If a
// peer makes another call, which makes the round invalid, no entry has a slot.
bool choose_replicas(Dispatch& d);

}  // namespace moecomm::host
