// The plan of dispatches with the same options and tensor types, made once; a further call costs a few comparisons and addresses.
#pragma once
#include <optional>
#include <vector>

#include "../protocol/args.h"
#include "arena.h"
#include "operand.h"
#include "schedule.h"

namespace moecomm::runtime {

struct DispatchInputs {  // null: not passed
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
struct LayerOutputs {
    Output x;
    std::optional<Output> scales;
    Output tokens_per_expert;
};

struct TableOutputs {
    Output weights, src, tokens_per_expert, num_rows;
    std::optional<Output> topk_idx;  // of a flat dispatch, whose `weights` are topk_weights
};
struct BatchedOutputs {
    Output x, tokens_per_expert;
};

// A dispatch uses two blocks of the window: `payload` for the rows, and `kept` for tables that combine and a repeat need as well.
class DispatchPlan {
  public:
    // `args` holds everything that depends on neither the tensors nor the outputs.  `like` must be validated already; later tensors must
    // match its dtypes and devices.
    DispatchPlan(const DispatchArgs& args, bool scale_columns, const DispatchInputs& like);

    Schedules& schedules() { return schedules_; }
    u64 kept_bytes(i32 max_rows) const;
    u64 payload_bytes(i32 max_rows) const;
    // Bytes of the rank with the most experts, which all ranks compute alike.
    u64 largest_kept_bytes(i32 max_rows) const;
    u64 largest_payload_bytes(i32 max_rows) const;

    // True if bind() and repeat() return arguments for these tensors, those of repeat() for a dispatch of as many tokens.
    bool takes(const DispatchInputs& inputs) const { return fits(inputs) && schedules_.count(static_cast<i32>(inputs.x->shape[0])) != 0; }
    // Return the arguments of a call; nullopt if the tensors do not match the plan, or if their number of tokens has no schedule.
    std::optional<DispatchArgs> bind(const Block& payload, const Block& kept, i32 max_rows, const DispatchInputs& inputs) const;
    // Return the arguments of a repeat, with the route and the rows of an earlier dispatch; nullopt as in bind().
    std::optional<DispatchArgs> repeat(const Block& payload, const DispatchArgs& earlier, const DispatchInputs& inputs) const;

    // The rows of a dispatch of any layout.
    Output rows_output(const DispatchArgs& args) const;
    // The outputs of a flat dispatch whose scales, if any, were passed by the caller and are stored by row.  Throws std::invalid_argument
    // for any other dispatch.
    FlatOutputs flat_outputs(const DispatchArgs& args) const;
    // The outputs of a dispatch in expert layout, with the same conditions.
    ExpertOutputs expert_outputs(const DispatchArgs& args) const;
    // The outputs of a layer's dispatch: in expert layout, of rows as given or cast to FP8 with float32 scales by row.
    LayerOutputs layer_outputs(const DispatchArgs& args) const;
    // The outputs of a batched dispatch.  Throws std::invalid_argument for any other dispatch.
    BatchedOutputs batched_outputs(const DispatchArgs& args) const;
    // The tables that a dispatch of any layout leaves of its rows.
    TableOutputs table_outputs(const DispatchArgs& args) const;
    const DLDevice& device() const { return x_.device(); }
    // Workers of a round of so many tokens; 0: it has no schedule.
    i32 workers(i32 num_tokens) const { return workers_of(schedules_, num_tokens); }

  private:
    bool fits(const DispatchInputs& inputs) const;
    std::optional<DispatchArgs> with_inputs(const DispatchInputs& inputs) const;
    void require_as_given(const DispatchArgs& args, Layout layout) const;
    std::optional<Output> scales_as_given(const DispatchArgs& args) const;
    void place_payload(DispatchArgs& args, const Block& payload) const;
    void place_kept(DispatchArgs& args, const Block& kept) const;

    DispatchArgs args_;
    bool scale_columns_;
    Operand x_, scales_, topk_idx_, topk_weights_;
    Schedules schedules_;
};

}  // namespace moecomm::runtime
