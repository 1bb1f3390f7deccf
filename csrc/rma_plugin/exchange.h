// Registering memory together: every rank tells every other what it registers, and gives it to those of its host.
#pragma once
#include <vector>

#include "mesh.h"
#include "region.h"

namespace moecomm::rma {

// Fills region.remote, for all ranks but `me`.  Waits for the others on the control connections.  Throws Failure.
void exchange(Region& region, std::vector<Channel>& channels, int me, Gpu* gpu, Deadline deadline);

void unmap(Region& region, Gpu* gpu);  // what exchange has mapped

}  // namespace moecomm::rma
