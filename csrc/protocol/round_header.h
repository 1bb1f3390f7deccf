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

// Dispatch: offsets in the sender's window where peers write; 0: the sender does not want that output.
struct DispatchHeader {
    u64 x, scales, src, topk_idx, weights, rows;
    u64 token_packet_bytes;  // bytes of a token's packets; 0: the sender's rows do not travel in packets
};

// Dispatch of row descriptors, as offsets in the sender's window. Peers need the last three to make row descriptors from the sender's ids.
struct DescriptorHeader {
    u64 out;  // where peers store row descriptors
    u64 pad;
    u64 published, published_stride;  // the sender's rows, and the bytes from one row to the next
    u64 receive_buffer;               // of the experts' result rows
    u64 more_pad[2];
};

// Combine, as offsets in the sender's window.
struct CombineHeader {
    u64 x;  // where peers read the sender's rows; 0: the rows are staged for peers
    u64 pad[3];
    u64 weights;  // host: of the experts' rows at `x`; 0: not weighted
    // Kernels. 1: `x` has reduced rows, by flat row, each valid once its chunk's `reduced` signal is there. 0: `x` has the experts' rows.
    u64 reduced;
    u64 pitch;  // bytes from one row at `x` to the next

    MOECOMM_BOTH constexpr bool staged() const { return x == 0; }
};

static_assert(sizeof(CombineHeader) == sizeof(DispatchHeader) && sizeof(DescriptorHeader) == sizeof(DispatchHeader),
              "RoundHeader{} zeroes every word");

struct RoundHeader {
    u32 op : 4;         // Op
    u32 rejected : 28;  // State::rejected: ranks that differ in it are out of step, and would pair calls that do not belong together
    u32 status;         // Argument: not none if this rank's input was bad, which makes the round invalid on every rank
    u64 call;  // what all ranks must pass alike (layout, dtypes, alignment, row bytes), as named bit fields: moecomm/core/signature.py
               // packs them
    union {
        i64 route_round;  // round_of the combined or repeated route, 0 without a route; also if status is `handle`
        i64 bad_value;    // the first bad value, if status is topk_idx
    };
    i32 num_tokens;
    i32 chunk_tokens;
    i32 max_rows;  // dispatch: rows for which this rank's output has room; batched: the sum over its experts, which have equal room
    i32 blocks;    // dispatch (kernels): blocks that share this rank's chunks. Each takes consecutive chunks, so receivers expect the first
                   // chunk of every block first
    union {
        DispatchHeader dispatch;
        DescriptorHeader descriptors;
        CombineHeader combine;
    };
};

constexpr i32 kHeaderWords = sizeof(RoundHeader) / sizeof(u32);
constexpr i32 kOpWord = 0, kCallWord = 2;  // words that a reader checks first: op and rejected; call
static_assert(sizeof(RoundHeader) == 96, "no padding: every word of it travels");
#if !MOECOMM_DEVICE  // NVRTC has no offsetof
static_assert(__builtin_offsetof(RoundHeader, status) == (kOpWord + 1) * 4 && __builtin_offsetof(RoundHeader, call) == kCallWord * 4,
              "the words of these");
#endif

}  // namespace moecomm
