// Argument structs of the kernels in elementwise/, for their launches as well.
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {

constexpr i32 kPassThreads = 256;  // of a block

// used_rows.cuh
struct PaddingArgs {
    u64 rows;                   // contiguous, `bytes` each
    u64 src, num_rows, counts;  // as in Routed; 0: not given
    i64 bytes;
    i32 count, group;  // rows; rows of a group (each group has one of `counts`)
};

// routing.cuh
struct MapArgs {
    u64 map;           // bool [tokens][experts]
    u64 dense;         // float [tokens][experts]: weight of each expert; 0: no weights
    u64 ids, weights;  // [tokens][topk]: ids, i64 as output; weights float, 0: none
    i32 tokens, experts, topk, pad;
};

// budgets.cuh
struct BudgetArgs {
    u64 ids, kept;  // [entries], of the same type
    u64 table;      // i32 [ranks][pitch]: entries of each expert, then the budget. count_entries adds to zeros, alike for all ranks
    u64 parts;      // i32 [experts][segments]: this rank's entries of each expert by segment. count_entries writes it
    u64 to;         // i64 [ranks]: 0, 1, ...
    u64 overflow;   // i32: 1 if this rank has too little room
    u64 needed;     // i64: the rows that it would need
    i32 entries, experts, ranks, rank, alignment, budget, pitch, segments;
};

// routing.cuh
struct ExpertTableArgs {
    u64 ids, meant;  // [entries], of the same type
    u64 table;       // [experts], of that type: what each id means; -1: no expert
    u64 absent;      // u64: gets the number of entries that mean no expert added
    i64 entries;
    i32 experts, id_bytes;
};

struct CopyRowsArgs {
    PaddingArgs of;  // which rows are empty, and the rows themselves
    u64 to;          // as many rows, contiguous
};

struct TidyArgs {
    PaddingArgs of;                           // which rows are empty; of.rows: 0 leaves them as they are
    u64 weights, ids, src, counts, num_rows;  // as in Routed; no ids: 0
    u64 to_weights, to_ids, to_src, to_counts, to_num_rows;
    i32 each, experts;  // weights (and ids) of a row; length of `counts`
};

// gradients.cuh
struct SwigluArgs {
    u64 both;                           // [rows][2 I]: `width` gate columns, then `width` up columns, and so on
    u64 inner;                          // [rows][I]: gradient of the activated values, without the routing weight
    u64 weights;                        // float [rows], the routing weights
    u64 to_both, to_inner, to_weights;  // gradients of `both`; activated values times the weight; gradients of weights
    u64 end;                            // i32: rows from here on are unused and stay as they are
    i32 count, columns, width;          // rows; I; see `both`
    float limit;                        // of gate or silu(gate) from above, and of up from both sides
};

struct GradientArgs {
    u64 rows, y;  // gradients of each row's token; y (0: no gradients of weights)
    u64 weights;  // float, one for each row
    u64 to_y, to_weights;
    i32 count, hidden;
};

// quantize_rows.cuh
struct QuantizeArgs {
    u64 x;               // [count][hidden], contiguous
    u64 values, scales;  // as the format has them, contiguous; no scales: 0
    u64 global_scale;    // float; 0: its bits are global_bits
    i32 count, hidden;   // rows; columns of x
    i32 global_bits, pad;
};

}  // namespace moecomm
