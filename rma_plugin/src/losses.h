// Report lost peers to kernels that wait for them, which NCCL cannot do.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace moecomm::rma::losses {

// Watch communicators of this job: a loss stores its abort_word (csrc/protocol/record.h) in `word`, unless `word` is not 0. `word`
// must live until watch(secret, nullptr), which ends the watch.
void watch(const std::string& job, uint32_t* word);
// Do not store losses of `rank`, or store them again. nth() has them all the same.
void ignore(const std::string& job, int rank, bool ignored);
// Called on NCCL's thread; takes a lock that no thread holds while it waits. `rank` is `own_rank` if the fault is on this rank. Returns
// true if the job is watched.
bool tell(const std::string& job, int own_rank, int rank, const std::string& what);
// Loss `number` since watch(), from 0: return its rank, or -1 if there are no more. `text` gets its description, cut to `bytes`.
int nth(const std::string& job, int number, char* text, size_t bytes);

}  // namespace moecomm::rma::losses
