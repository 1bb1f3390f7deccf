// Launch arguments and workspace of the fused operators. Plain C++, described to Python like gemm/args.h.
//
// Every operator is a round. A rank counts its rounds in its own memory, so a captured launch that is replayed is a new round. Flags hold
// the number of the round that raised them, and grow; staging and flags alternate between two halves. Each rank's result of a round has a
// part that each peer computes in that round, so a rank that ends round n knows that every peer has begun it, and so has ended round n - 1.
// It may then store into the half that round n - 1 used.
#pragma once
#include "../gemm/args.h"
#include "../window/window.h"

namespace moecomm {

constexpr i32 kOverlapRanks = 8;  // at most
constexpr i32 kFlags = 32768;     // words of a half that say what has arrived
constexpr i32 kCounters = 4;
constexpr i32 kSliceRows = 32;                                         // of a tile, that a warp collects at once
constexpr i32 kGemvRows = 16, kGemvColumns = 16, kGemvThreads = 1024;  // most rows of x; columns of a block
constexpr i32 kGemvWarps = 8;                                          // of a group: gemv_all_reduce.cuh
constexpr i32 kGemvGroups = kGemvThreads / (kGemvWarps * 32);
constexpr i32 kEmbeddingThreads = 1024, kAllReduceThreads = 512;
constexpr i32 kAllReduceWords = 60, kAllReduceBytes = 512;  // of a part, which a warp stores at once; of its lines of packets

// This rank's alone. All zero when the Window opens; counters are zero between rounds.
struct OverlapState {
    u64 round;                // rounds that have ended
    u32 ended;                // blocks that have ended in this round
    u32 counters[kCounters];  // work items taken by the warps of all blocks
    // The first wait that failed, for the failure record.
    u32 which;  // flag
    u64 seen;
    u64 waited_ns;
    u64 pad[10];
};
static_assert(sizeof(OverlapState) == 128, "its own line");

// A workspace. Numbers are equal on all ranks, but for the Window's addresses and rank.
struct Overlap {
    Window window;
    u64 peers[kOverlapRanks];  // address of every rank's memory: a copy of the Window's table, so that no kernel waits to load it
    u64 control;               // address of this rank's control words of the Window, for the same reason
    // Offsets in the memory of every rank.
    u64 state;       // OverlapState
    u64 flags;       // u64[2][kFlags]
    u64 packets[2];  // lines that carry their own tags (gemv_all_reduce.cuh, all_reduce.cuh), and never anything else
    u64 staging[2];
};

// all_gather_matmul.cuh
struct GatherMatmulArgs {
    GemmArgs gemm;                     // x, x_scales: this rank's rows. grouping: `groups` ranks of `group_rows` rows each
    TensorMap gathered[2 * kRowMaps];  // rows of all ranks, in this rank's staging, by half
    Overlap overlap;
    u64 x;                    // rows of this rank
    u64 gathered_out;         // [groups * group_rows][depth], or 0: not wanted
    u64 gathered_scales_out;  // e4m3: f32[groups * group_rows][depth / 128], with gathered_out
    u64 scales;               // e4m3: bytes from the beginning of a half of staging to the scales of the rows of all ranks
    i32 piece_rows;           // rows that a warp pushes, and raises a flag for, at a time
    i32 pieces;               // of a rank
};
static_assert(sizeof(GatherMatmulArgs) <= 4096, "what a kernel takes");

// matmul_send.cuh
struct SendMatmulArgs {
    GemmArgs gemm;  // grouping: blocks of rows, see send_tiles.h. out: the result
    Overlap overlap;
    u64 results;     // all-reduce: bytes from the beginning of a half to the reduced tiles
    i32 pitch_rows;  // rows of a tile in staging: those of the largest
    i32 slices;      // parts of a tile, of kSliceRows rows, that a warp collects at once
};

// gemv_all_reduce.cuh
struct GemvArgs {
    Overlap overlap;
    u64 x, w, out;  // [rows][depth], [columns][depth], [rows][columns]
    i32 rows, columns, depth, pad;
};

// all_reduce.cuh
struct AllReduceArgs {
    Overlap overlap;
    u64 x, out;  // of `words` words of 8 bytes
    i64 words;
};

// embedding_all_to_all.cuh
struct EmbeddingArgs {
    Overlap overlap;
    u64 tables;   // [num_tables][num_rows][columns]
    u64 indices;  // i64: [num_tables][ranks * batch][pooling], or with offsets all bags one after the other
    u64 offsets;  // i64[num_tables * ranks * batch + 1], or 0
    u64 out;      // [ranks][num_tables][batch][columns]
    i64 num_rows, num_indices;
    i32 num_tables, batch, pooling, columns;
    i32 piece_bags, pieces;  // bags that raise a flag together; flags of a destination
};

// Lines of 120 bytes of content (protocol/packets.h) in the packet of a unit of the GEMV, for 8 or 16 rows.
MOECOMM_BOTH constexpr i32 gemv_lines(i32 most_rows) { return ceil_div(most_rows * kGemvColumns * 2, 120); }
// Bytes of SplitSums (split_depth.cuh), which asserts that they are enough.
MOECOMM_BOTH constexpr i32 split_sums_bytes(i32 most_rows) { return most_rows / 8 * kMathGroups * kWarpgroup * 16 + 16; }
// Dynamic shared memory of a block of the GEMV, which asserts that it is enough.
MOECOMM_BOTH constexpr i32 gemv_shared_bytes(i32 most_rows) {
    return kGemvGroups * (kGemvWarps * most_rows * kGemvColumns * 4 + gemv_lines(most_rows) * 120);
}

}  // namespace moecomm
