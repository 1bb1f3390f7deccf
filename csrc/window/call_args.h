// Arguments of the kernels in calls.cuh, pace.cuh, copies.cuh and weights.cuh, for their launches as well.
#pragma once
#include "../elementwise/args.h"
#include "window.h"

namespace moecomm {

struct WindowCallArgs {
    Window window;
    u64 value;  // to add, to store, or to wait for
    i32 rank;   // whose signal; wait: the rank that raises it, or -1
    i32 index;  // of the signal
};

struct PauseArgs {
    u64 due;  // of a u64 in device memory: when the copies so far may have ended, by the GPU's clock
    u64 ns;   // that the last copy takes at the wanted rate
};

// Tensors of slots in Windows, of which some slots are copies for a round (kReplicated in protocol/placement.h).
constexpr i32 kMostCopied = 6;  // of both GEMMs: weights, scales and biases
struct CopyArgs {
    u64 copied;                // i32[ranks][slots]: the slot of all ranks of which a slot is a copy, or -1
    u64 peers[kMostCopied];    // u64[ranks]: address of every rank's memory in the Window of a tensor, as this rank reaches it
    u64 offsets[kMostCopied];  // of the tensor there
    u64 nbytes[kMostCopied];   // of a slot
    i32 tensors, rank, slots, pad;
};

// weights.cuh. Work of one launch: all of it in the arguments, of which a kernel takes 4 KB.
struct CopyJob {
    u64 to;    // aligned to 16 bytes; 0: hash alone
    u64 from;  // aligned to 16 bytes
    u64 hash;  // u64, to which the hash is added; 0: copy alone
    i64 bytes;
};
constexpr i32 kMostCopies = 120;
struct CopyWeightsArgs {
    i32 count, pad;
    CopyJob jobs[kMostCopies];
};

struct CastJob {
    QuantizeArgs matrix;  // global_scale: of NVFP4, a u32 that has the bits of the largest magnitude
    u64 hash;             // u64[parts]: hashes of values, scales and factor are added to these
    u64 factor;           // of NVFP4: float
};
constexpr i32 kMostCasts = 63;
struct CastWeightsArgs {
    i32 count, pad;
    CastJob jobs[kMostCasts];
};

struct TellArgs {
    u64 value;             // that each reader reads in its word
    i32 count, pad;        // of readers
    u64 words[kMaxRanks];  // their addresses
};

}  // namespace moecomm
