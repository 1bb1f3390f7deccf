// Peers that can't be reached any more, told to kernels that wait for them: NCCL has no way to.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace moecomm::rma::losses {

// The first loss of a communicator with this secret becomes abort_word (csrc/protocol/record.h) in `word`, unless that holds something;
// null: nobody waits any more.  It lives until then.
void watch(const std::string& secret, uint32_t* word);
// On NCCL's thread: takes a lock that nobody holds while waiting.  `rank`: ours where something here is broken.
void tell(const std::string& secret, int own_rank, int rank, const std::string& what);
// What was told first since watch(), cut to `bytes`; -1: nothing, else the rank.
int first(const std::string& secret, char* text, size_t bytes);

}  // namespace moecomm::rma::losses
