// One random case: a shape, some dispatches, and the order of the rounds on them.  Inputs live here, outputs in the windows.
#pragma once
#include <memory>
#include <vector>

#include "cluster.h"
#include "protocol/domains.h"
#include "random.h"

namespace moecomm::test {

// Input of one rank to a dispatch.
struct Input {
    i32 tokens, chunk_tokens, workers;
    i64 x_stride, scales_stride;
    std::vector<u8> x, scales;
    std::vector<i64> ids;    // [tokens][topk]
    std::vector<i32> ids32;  // the same, if the call has 32-bit ids
    std::vector<float> weights;
};

// The plain memory of a rank's route and small outputs, and offsets of the large ones in its window.
struct ReceiveBuffer {
    std::vector<i32> token_rows, token_owner, token_slot, relayed, tokens_per_expert, num_rows;
    std::vector<i64> rows_per_expert;
    std::vector<SourceTokens> sent;  // and two more, where round_of and seal_of lie
    std::vector<u32> ranges, scale_columns;
    u64 x = 0, scales = 0, src = 0, topk_idx = 0, weights = 0, rows = 0;
    i32 max_rows = 0;
    i64 scale_stride = 0;
};
constexpr i32 kUnset = 12345;  // what the plain memory holds before anybody writes to it

// A dispatch on all ranks.
struct Dispatched {
    Layout layout;
    Type in_type;
    bool quantize, scale_columns, weighted;  // weighted: topk_weights are given
    ScaleFormat scale_format;
    i32 hidden, row_bytes, scale_bytes, alignment, idx_bytes;
    std::vector<Input> input;  // by rank
    std::vector<ReceiveBuffer> receive_buffer;
    std::vector<ReceiveBuffer> begun;     // the plain memory as the first half left it, where the dispatch was made in two
    const Dispatched* repeats = nullptr;  // the dispatch whose route this one takes again

    Type row_type() const { return quantize ? Type::e4m3 : in_type; }
};

// A combine on all ranks of what an earlier dispatch routed.
struct Combined {
    struct Part {
        i32 workers;
        i64 y_stride, bias_stride, out_stride;
        std::vector<u8> y, bias, out;
        bool y_in_window;
        u64 y_at = 0;  // there
        std::vector<float> grads, out_grads, weights;
    };
    const Dispatched* routed;
    Type type, bias_type, wire;
    bool weighted, bias, grads, own_weights;  // own_weights: those of the parts, not those of the dispatch
    std::vector<Part> parts;
};

// A call: one of the two.
struct Step {
    Dispatched* dispatch = nullptr;
    Combined* combine = nullptr;
    Part part = Part::whole;
};

struct Limits {
    i32 ranks = 8;        // at most
    i32 fixed_ranks = 0;  // exactly, if not 0
    i32 workers = 3;
    i32 fixed_tokens = 0;  // Shape::max_tokens, if not 0
    bool several_domains = false;
    i32 fixed_domain_ranks = 0;  // Shape::domain_ranks, if not 0
};

struct Scenario {
    Shape shape;
    std::vector<std::unique_ptr<Dispatched>> dispatches;
    std::vector<std::unique_ptr<Combined>> combines;
    std::vector<Step> steps;
};

// How many groups of rows have scale columns of their own.
// The experts of a rank: each rank in turn takes its share of those that are left.
struct OfRank {
    i32 first, count;
};
OfRank experts_of(const Shape& s, i32 rank);
i32 owner_of(const Shape& s, i64 expert);

i32 scale_groups(const Shape& shape, const Dispatched& d, i32 rank);
// Rows that `rank` needs to take what all ranks send it.
i64 rows_needed(const Shape& shape, const Dispatched& d, i32 rank);

Scenario random_scenario(Random& random, const Limits& limits);
// Room in the windows for the outputs of all dispatches; call once for a cluster made of scenario.shape.
void place_outputs(const Scenario& scenario, Cluster& cluster);

// Puts the rows of `y` where the call takes them from.
void place_rows(const Cluster& cluster, const Combined& c, i32 rank);

// Every other case crosses the place where tags wrap, after two rounds at least: signals that no round has left are of round 0.
void begin_near_wrap(const Cluster& cluster, u64 seed);
// Make the call on this rank.
void run_step(const Cluster& cluster, const Step& step, i32 rank);

DispatchArgs dispatch_args(const Cluster& cluster, Dispatched& d, i32 rank);
CombineArgs combine_args(const Cluster& cluster, Combined& c, i32 rank);

}  // namespace moecomm::test
