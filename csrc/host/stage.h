// What our experts' rows add up to, laid out for the homes of the tokens.
#pragma once
#include "combine.h"

namespace moecomm::host {

// Have the tokens of a chunk of `home` rows here?
bool rows_here(const Combine& c, i32 source_rank, i32 chunk);
// The first weight of these that has not come, or the signal of the mail that comes after it from another domain; null: all have, or none
// is to come.
const u64* missing_weight(const Combine& c, i32 source_rank, i32 chunk);
// Stages them, and tells who pulls them: `home`, or who relays for it in our domain.  `scratch`: float[kColumns].
void stage_chunk(const Combine& c, i32 source_rank, i32 chunk, float* scratch);
// The same where they go straight home.
void put_chunk(const Combine& c, DirectSends& sent, i32 source_rank, i32 chunk, float* scratch);

}  // namespace moecomm::host
