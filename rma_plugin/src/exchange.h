// Collective registration of memory: every rank announces its region to all others and gives them its memory.
#pragma once
#include <vector>

#include "mesh.h"
#include "region.h"

namespace moecomm::rma {

// Fill region.remote for all ranks but `me`. Waits for the other ranks on their channels. Throws Failure.
void exchange(Region& region, std::vector<Channel>& channels, int me, Gpu* gpu, Deadline deadline);

void unmap(Region& region, Gpu* gpu);  // undo the mappings of exchange

}  // namespace moecomm::rma
