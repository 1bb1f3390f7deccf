// What every rank tells every peer at the start of every round, before the first payload byte: its counts (beside it, see layout.h),
// where its output lies, and how it called.  It is also the flow control: a peer writes to our output only after it saw our notice.
#pragma once
#include "record.h"

namespace moecomm {

struct Notice {
    u64 tag;        // tag_signal(round); written last, with release
    u32 op;         // Op
    u32 status;     // Argument: not none if this rank's input was bad, and the round is void on every rank
    u64 call;       // a hash of what all ranks must have passed alike (layout, dtypes, alignment, row bytes)
    i64 bad_value;  // the first bad value, when status is not none
    i32 num_tokens;
    i32 chunk_tokens;
    i32 max_rows;  // rows this rank's output can take (all layouts but batched)
    i32 pad;
    // Offsets in the sender's window.  dispatch: where peers write.
    u64 x, scales, src, topk_idx, weights, rows;
    // combine: where peers read: rows reduced for them at `staging`; or, where `x` is not 0, the experts' rows themselves at `x`, `pitch`
    // bytes apart, and their weights at `weights` (0: not weighted).
    u64 staging;
    u64 pitch;
};
static_assert(sizeof(Notice) == 112, "one store each of seven 16-byte words");

}  // namespace moecomm
