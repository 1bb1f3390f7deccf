// Arguments of the kernels in calls.cuh, pace.cuh and copies.cuh, for their launches as well.
#pragma once
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

// copy_hashed.cuh
struct CopyHashedArgs {
    u64 to;    // aligned to 16 bytes; 0: hash alone
    u64 from;  // aligned to 16 bytes
    u64 hash;  // u64, to which the hash is added
    i64 bytes;
};

}  // namespace moecomm
