// Report lost peers to kernels that wait for them, which NCCL cannot do.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace moecomm::rma::losses {

// Watch communicators with this secret: the first loss stores its abort_word (csrc/protocol/record.h) in `word`, unless `word` is not 0.
// `word` must live until watch(secret, nullptr), which ends the watch.
void watch(const std::string& secret, uint32_t* word);
// Called on NCCL's thread; takes a lock that no thread holds while it waits. `rank` is `own_rank` if the fault is on this rank.
void tell(const std::string& secret, int own_rank, int rank, const std::string& what);
// The first loss since watch(): returns the rank, or -1 for none; `text` gets its description, cut to `bytes`.
int first(const std::string& secret, char* text, size_t bytes);

}  // namespace moecomm::rma::losses
