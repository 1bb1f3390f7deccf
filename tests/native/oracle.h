// Expected results of rounds, from the meaning of the operations alone: no counts, flags or staging.
#pragma once
#include <vector>

#include "scenario.h"

namespace moecomm::test {

// The output of a dispatch on one rank, byte for byte; what nobody writes is kUntouched.
struct Arrived {
    std::vector<u8> x, scales, src, topk_idx, weights, rows;
    std::vector<u32> scale_columns;
    std::vector<i32> tokens_per_expert;
    std::vector<i64> rows_per_expert;
    std::vector<SourceTokens> sent;
    std::vector<u32> ranges;  // a chunk that brings nothing: only the count of 0 is sure
    i32 num_rows = 0;
};

struct Routed {
    std::vector<Arrived> arrived;                    // by rank
    std::vector<std::vector<i32>> row, owner, slot;  // by rank: Route::token_rows, token_owner, token_slot
};

Routed expect_dispatch(const Shape& shape, const Dispatched& d);

struct SourceReduce {
    std::vector<u8> out;  // laid out like Combined::Part::out
    std::vector<float> grads;
};
// The output of a combine on one rank.  `routed` is that of the dispatch.
SourceReduce expect_combine(const Shape& shape, const Combined& c, const Routed& routed, i32 rank);

}  // namespace moecomm::test
