// Our tokens to the ranks that own their experts.
#pragma once
#include <vector>

#include "dispatch.h"

namespace moecomm::host {

// Places (unless the dispatch is a repeat) and sends the tokens of a chunk, then its flag to every rank.  `packed` is scratch.
void send_chunk(Dispatch& d, i32 chunk, std::vector<u8>& packed);

}  // namespace moecomm::host
