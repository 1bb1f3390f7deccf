// Round header: how a rank called, and where its output is stored. Every rank sends it to every peer at the start of a round, before the
// first payload byte; in a dispatch, the rank's counts follow. It is also the flow control: a peer writes to this rank's output only after
// it has received this rank's header.
//
// A header travels as tagged words (NCCL's LL protocol): 32 bits beside the tag of the round. A word has arrived when its tag is there, so
// nothing has to be ordered, and one link latency is enough.
#pragma once
#include "record.h"
#include "signal.h"

namespace moecomm {

// Dispatch: where peers write.
struct DispatchOffsets {
    u64 x, scales, src, topk_idx, weights, rows;
    u64 token_packet_bytes;  // of a token, if the sender's rows travel in packets, else 0
};

// Dispatch of row descriptors: where peers write them, and the fields with which a peer makes those of the sender's tokens from its ids.
struct PublishedOffsets {
    u64 descriptors, scales;
    u64 rows, pitch;  // the published rows
    u64 result_rows;  // of the results
    u64 unused, token_packet_bytes;
};

// Combine: where peers read, unless rows are staged for them.
struct CombineOffsets {
    u64 rows;  // the experts' rows, or reduced rows; 0: staged
    u64 unused[3];
    u64 weights;     // of the experts' rows, where those are read in place; 0: not weighted
    u64 is_reduced;  // kernels: `rows` are reduced rows, by flat row, each valid once its chunk's `reduced` signal is there
    u64 pitch;       // from one of `rows` to the next
};

struct RoundHeader {
    u32 op : 4;         // Op
    u32 rejected : 28;  // State::rejected: ranks that differ in it are out of step, and would pair calls that do not belong together
    u32 status;         // Argument: not none if this rank's input was bad, which makes the round invalid on every rank
    u64 call;  // what all ranks must pass alike (layout, dtypes, alignment, row bytes), as named bit fields: moecomm/rounds/signature.py
               // packs them
    union {
        i64 bad_value;    // status is topk_idx: the first bad id
        i64 route_round;  // else: round_of the route that is combined or repeated, also if status is handle; 0 without one
    };
    i32 num_tokens;
    i32 chunk_tokens;
    i32 max_rows;  // rows for which this rank's output has room; batched: the sum over its experts, which have equal room
    i32 blocks;    // dispatch (kernels): blocks that share this rank's chunks. Each takes consecutive chunks, so receivers expect the first
                   // chunk of every block first
    // Offsets in the sender's window, and distances in bytes, by operation.
    union {
        DispatchOffsets dispatch;
        PublishedOffsets published;
        CombineOffsets combine;
    };
};

constexpr i32 kHeaderWords = sizeof(RoundHeader) / sizeof(u32);
constexpr i32 kOpWord = 0, kCallWord = 2;  // words that a reader checks first: op and rejected; call
constexpr i32 kStatusWord = 1, kTokensWord = 6;
static_assert(sizeof(RoundHeader) == 96, "no padding: every word of it travels");
static_assert(sizeof(DispatchOffsets) == sizeof(PublishedOffsets) && sizeof(DispatchOffsets) == sizeof(CombineOffsets),
              "RoundHeader{} zeroes the first struct of the union, which must cover all");
#if !MOECOMM_DEVICE  // NVRTC has no offsetof
static_assert(__builtin_offsetof(RoundHeader, status) == kStatusWord * 4 && __builtin_offsetof(RoundHeader, call) == kCallWord * 4 &&
                  __builtin_offsetof(RoundHeader, num_tokens) == kTokensWord * 4,
              "the words of these");
#endif

}  // namespace moecomm
