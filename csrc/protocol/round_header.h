// What every rank tells every peer at the start of every round, before the first payload byte: how it called, where its output lies, and
// (dispatch) its counts.  It is also the flow control: a peer writes to our output only after it saw our notice.
//
// A notice travels as mail: 32 bits a word, each beside the tag of the round.  A word is there when its own tag is, so that nothing has to
// be ordered, and one flight over the link is enough.
#pragma once
#include "record.h"
#include "signal.h"

namespace moecomm {

struct RoundHeader {
    u32 op : 4;         // Op
    u32 rejected : 28;  // State::rejected: ranks that differ in it are out of step, and would pair calls that do not belong together
    u32 status;         // Argument: not none if this rank's input was bad, and the round is void on every rank
    u64 call;           // a hash of what all ranks must have passed alike (layout, dtypes, alignment, row bytes)
    i64 value;          // the first bad value, when status is not none; else round_of the route that is combined or repeated, 0 without one
    i32 num_tokens;
    i32 chunk_tokens;
    i32 max_rows;  // rows this rank's output can take; batched: of all its experts, each has as many
    i32 blocks;    // dispatch: so many share the chunks of this rank out, neighbours together: the first chunks of all come first (kernels)
    // Offsets in the sender's window.  dispatch: where peers write; `pitch`, if not 0, says that the sender's rows come in packets, and the
    // bytes of those of a token.  Of slips `src` and `topk_idx` say where the sender offers its rows, and how far apart, and `weights`
    // where what is made of them goes: for who has told others its ids.
    u64 x, scales, src, topk_idx, weights, rows;
    // combine: where peers read, if not rows reduced for them in our staging: where `x` is not 0, the experts' rows themselves at `x`,
    // `pitch` bytes apart, and their weights at `weights` (0: not weighted).  Kernels: with `rows` not 0, rows reduced for them, by flat
    // row, each when the flag of its chunk is there.
    u64 pitch;
};

constexpr i32 kHeaderWords = sizeof(RoundHeader) / sizeof(u32);
constexpr i32 kOpWord = 0, kCallWord = 2;  // where a reader looks first: op and rejected, call
static_assert(sizeof(RoundHeader) == 96, "no padding: every word of it travels");
#if !MOECOMM_DEVICE  // NVRTC has no offsetof
static_assert(__builtin_offsetof(RoundHeader, status) == (kOpWord + 1) * 4 && __builtin_offsetof(RoundHeader, call) == kCallWord * 4,
              "the words of these");
#endif

}  // namespace moecomm
