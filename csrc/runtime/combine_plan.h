// The plan of combines with the same options and tensor types, made once; a further call costs a few comparisons and addresses.
#pragma once
#include <optional>

#include "../protocol/args.h"
#include "operand.h"
#include "schedule.h"

namespace moecomm::runtime {

struct CombineTensors {  // null: not passed
    const DLTensor *y, *out, *bias, *weight_grads, *out_weight_grads, *topk_weights;
};

// True if a tensor with strides shares bytes with the tables of a dispatch, which begin with `src` and end with `num_rows`
// (dispatch_plan.cpp), or with its row weights, which an operator's handle stores elsewhere.
bool shares_tables(const DispatchArgs& dispatch, const DLTensor& tensor);

class CombinePlan {
  public:
    // `args` holds everything that depends on neither the tensors nor the dispatch.  `like` must be validated already; later tensors must
    // match its dtypes and devices, and `y` must be inside this rank's window if like.y is: peers then read it in place, which is another
    // kernel.
    CombinePlan(const CombineArgs& args, const CombineTensors& like);

    Schedules& schedules() { return schedules_; }
    const CombineArgs& args() const { return args_; }
    // Workers of a round of so many tokens; 0: it has no schedule.
    i32 workers(i32 num_tokens) const { return workers_of(schedules_, num_tokens); }
    // True if an address is in the heap of this rank's window.
    bool in_window(u64 address) const;
    // True if the plan is for such inputs; outputs are not looked at.
    bool takes(const DispatchArgs& dispatch, const CombineTensors& inputs) const;
    // Return the arguments of a call; nullopt if the tensors do not match the plan or the sizes of the dispatch, or if its number of tokens
    // has no schedule.  `reduced_rows`: see CombineArgs.
    std::optional<CombineArgs> bind(const DispatchArgs& dispatch, const CombineTensors& tensors, u64 reduced_rows = 0) const;

  private:
    bool fits(const DispatchArgs& dispatch, const CombineTensors& tensors) const;
    bool has_place(const DLTensor& y) const;
    bool is_y(const DispatchArgs& dispatch, const DLTensor& y) const;
    bool is_weight_grads(const DispatchArgs& dispatch, const DLTensor& grads) const;

    CombineArgs args_;
    Operand y_, bias_, weight_grads_, topk_weights_;
    bool y_in_window_;
    Schedules schedules_;
};

}  // namespace moecomm::runtime
