// What dispatches of one kind have in common, worked out once: a further one is a few comparisons and addresses.
#pragma once
#include <optional>
#include <vector>

#include "../protocol/args.h"
#include "arena.h"
#include "operand.h"
#include "schedule.h"

namespace moecomm::runtime {

struct DispatchInputs {  // null: not given
    const DLTensor *x, *scales, *topk_idx, *topk_weights;
};

struct Output {  // a C-contiguous tensor
    u64 address;
    std::vector<i64> shape;
    DLDataType type;
};
struct FlatOutputs {
    Output x;
    std::optional<Output> scales;
    Output topk_idx, topk_weights;
};
struct ExpertOutputs {
    Output x;
    std::optional<Output> scales;
    Output row_weights, rows_per_expert;
};
struct BatchedOutputs {
    Output x, tokens_per_expert;
};

// A dispatch takes two blocks of the window: what arrives (`payload`), and what combine and a repeat need as well (`kept`).
class DispatchPlan {
  public:
    // `args` has everything that is not a tensor's and not an output's; `like` is checked already, and later tensors must be of the same
    // types in the same places.
    DispatchPlan(const DispatchArgs& args, bool scale_columns, const DispatchInputs& like);

    Schedules& schedules() { return schedules_; }
    u64 kept_bytes(i32 max_rows) const;
    u64 payload_bytes(i32 max_rows) const;

    // Null unless the tensors are what the plan is for, and their number of tokens has a schedule.
    std::optional<DispatchArgs> bind(const Block& payload, const Block& kept, i32 max_rows, const DispatchInputs& inputs) const;
    // The same with the route and the rows of an earlier dispatch.
    std::optional<DispatchArgs> repeat(const Block& payload, const DispatchArgs& earlier, const DispatchInputs& inputs) const;

    // Of a flat dispatch, whose scales, if there are any, were given and stay beside their rows.  Throws std::invalid_argument for another.
    FlatOutputs flat_outputs(const DispatchArgs& args) const;
    // The same of rows of experts.
    ExpertOutputs expert_outputs(const DispatchArgs& args) const;
    // Of a batched one.  Throws std::invalid_argument for another.
    BatchedOutputs batched_outputs(const DispatchArgs& args) const;
    const DLDevice& device() const { return x_.device(); }

  private:
    bool fits(const DispatchInputs& inputs) const;
    std::optional<DispatchArgs> with_inputs(const DispatchInputs& inputs) const;
    void require_as_given(const DispatchArgs& args, Layout layout) const;
    Output rows_as_given(const DispatchArgs& args) const;
    std::optional<Output> scales_as_given(const DispatchArgs& args) const;
    void place_payload(DispatchArgs& args, const Block& payload) const;
    void place_kept(DispatchArgs& args, const Block& kept) const;

    DispatchArgs args_;
    bool scale_columns_;
    Operand x_, scales_, topk_idx_, topk_weights_;
    Schedules schedules_;
};

}  // namespace moecomm::runtime
