// Staging: the reduced rows of this rank's experts, stored for the source ranks to pull.
#pragma once
#include "combine.h"

namespace moecomm::host {

// True if this rank has rows of a chunk's tokens.
bool rows_here(const Combine& c, i32 source_rank, i32 chunk);
// Return the first weight of the chunk that has not arrived or, for a source rank in another domain, the signal that follows its weights.
// Null if all have arrived or the callers pass no weights.
const u64* missing_weight(const Combine& c, i32 source_rank, i32 chunk);
// With checks: leave the hashes of all rows that peers read in place.
void check_in_place(const Combine& c);
// Stage the chunk's rows and signal, with release, the rank that pulls them: the source rank, or its return-forwarder in this domain.
// `scratch`: float[kColumns].
void stage_chunk(const Combine& c, i32 source_rank, i32 chunk, float* scratch);
// Reduce the chunk's rows and put them to a source rank in another domain without a return-forwarder.
void put_chunk(const Combine& c, DirectSends& sent, i32 source_rank, i32 chunk, float* scratch);

}  // namespace moecomm::host
