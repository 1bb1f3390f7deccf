// What combines of one kind have in common, worked out once: a further one is a few comparisons and addresses.
#pragma once
#include <optional>

#include "../protocol/args.h"
#include "operand.h"
#include "schedule.h"

namespace moecomm::runtime {

struct CombineTensors {  // null: not given
    const DLTensor *y, *out, *bias, *weight_grads, *out_weight_grads, *topk_weights;
};

// Whether a tensor with strides has bytes in common with the tables of a dispatch, of which the first is `src` and the last `num_rows`
// (dispatch_plan.cpp), or with its row weights, which a handle of an operator has elsewhere.
bool shares_tables(const DispatchArgs& dispatch, const DLTensor& tensor);

class CombinePlan {
  public:
    // `args` has everything that is not a tensor's and not the dispatch's; `like` is checked already, and later tensors must be of the same
    // types in the same places, y in our window if it is there: peers may read it in place then, which is another kernel.
    CombinePlan(const CombineArgs& args, const CombineTensors& like);

    Schedules& schedules() { return schedules_; }
    // Null unless the tensors are what the plan is for and as large as the dispatch says, and its number of tokens has a schedule.
    // `sums`: see CombineArgs.
    std::optional<CombineArgs> bind(const DispatchArgs& dispatch, const CombineTensors& tensors, u64 reduced_rows = 0) const;

  private:
    bool fits(const DispatchArgs& dispatch, const CombineTensors& tensors) const;
    bool in_window(u64 address) const;
    bool is_y(const DispatchArgs& dispatch, const DLTensor& y) const;
    bool is_weight_grads(const DispatchArgs& dispatch, const DLTensor& grads) const;

    CombineArgs args_;
    Operand y_, bias_, weight_grads_, topk_weights_;
    bool y_in_window_;
    Schedules schedules_;
};

}  // namespace moecomm::runtime
