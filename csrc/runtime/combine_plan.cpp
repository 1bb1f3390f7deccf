#include "combine_plan.h"

#include "../protocol/slots.h"

namespace moecomm::runtime {
namespace {

// True for a contiguous tensor [local experts, rows of each, ...].
bool is_batch(const DispatchArgs& dispatch, const DLTensor& t, i32 ndim) {
    const i32 here = expert_ranges(dispatch.ctx.shape).count(dispatch.ctx.rank);
    return t.ndim == ndim && t.shape[0] == here && t.shape[1] == batched_group(dispatch.max_rows, here) && is_contiguous(t);
}

bool is_layout(const DispatchArgs& dispatch, Layout layout) { return dispatch.layout == static_cast<i32>(layout); }

// True if `out` is the bias itself: each element is read just before it is overwritten, which is safe.
bool is_written_over(const DLTensor& out, const DLTensor& bias) {
    return bias.ndim == 2 && address_of(out) == address_of(bias) && pitch_of(out) == pitch_of(bias);
}

// True if an output shares bytes with memory that this rank or a peer still reads meanwhile.
bool overwrites(const DispatchArgs& dispatch, const CombineTensors& t) {
    const DLTensor& out = *t.out;
    if (share_memory(out, *t.y) || shares_tables(dispatch, out)) return true;
    if (t.bias != nullptr && share_memory(out, *t.bias) && !is_written_over(out, *t.bias)) return true;
    if (t.weight_grads != nullptr && share_memory(out, *t.weight_grads)) return true;
    return t.topk_weights != nullptr && share_memory(out, *t.topk_weights);
}

}  // namespace

bool shares_tables(const DispatchArgs& dispatch, const DLTensor& tensor) {
    if (is_empty(tensor)) return false;
    const u64 first = address_of(tensor), end = end_of(tensor);
    const auto has = [&](u64 table, u64 table_end) { return first < table_end && table < end; };
    const Route& route = dispatch.route;
    const u64 weights = route.row_weights != 0 ? route.row_weights + static_cast<u64>(dispatch.max_rows) * sizeof(float) : 0;
    return has(route.src, dispatch.num_rows + sizeof(i32)) || has(route.row_weights, weights);
}

CombinePlan::CombinePlan(const CombineArgs& args, const CombineTensors& like)
    : args_(args),
      y_(like.y),
      bias_(like.bias),
      weight_grads_(like.weight_grads),
      topk_weights_(like.topk_weights),
      y_in_window_(in_window(address_of(*like.y))) {}

bool CombinePlan::in_window(u64 at) const {
    const Context& ctx = args_.ctx;
    const u64 first = window_of(ctx, ctx.rank);
    return at >= first + ctx.window.heap && at < first + ctx.window.bytes;
}

// True if peers can read y where it is, as rows that travel unsummed require, or y is where the plan expects it.
bool CombinePlan::has_place(const DLTensor& y) const {
    const bool here = in_window(address_of(y));
    return args_.unsummed != 0 ? here || is_empty(y) : here == y_in_window_;
}

bool CombinePlan::is_y(const DispatchArgs& dispatch, const DLTensor& y) const {
    if (!has_place(y)) return false;
    if (!is_layout(dispatch, Layout::batched)) return is_rows(y, dispatch.max_rows, args_.hidden);
    return is_batch(dispatch, y, 3) && y.shape[2] == args_.hidden && address_of(y) % static_cast<u64>(kRowAlignment) == 0;
}

bool CombinePlan::is_weight_grads(const DispatchArgs& dispatch, const DLTensor& grads) const {
    if (is_layout(dispatch, Layout::batched)) return is_batch(dispatch, grads, 2);
    if (is_layout(dispatch, Layout::flat)) return is_packed(grads, dispatch.max_rows, args_.ctx.shape.topk);
    return grads.ndim == 1 && grads.shape[0] == dispatch.max_rows && is_contiguous(grads);
}

bool CombinePlan::takes(const DispatchArgs& dispatch, const CombineTensors& t) const {
    if (dispatch.layout != args_.layout || t.y == nullptr) return false;
    if (!y_.fits(t.y) || !bias_.fits(t.bias) || !weight_grads_.fits(t.weight_grads) || !topk_weights_.fits(t.topk_weights)) return false;
    return is_y(dispatch, *t.y);
}

bool CombinePlan::fits(const DispatchArgs& dispatch, const CombineTensors& t) const {
    const i64 tokens = dispatch.num_tokens, hidden = args_.hidden;
    if (!takes(dispatch, t) || t.out == nullptr || !y_.fits(t.out)) return false;
    if (!is_rows(*t.out, tokens, hidden) || !rows_apart(*t.out)) return false;
    if (t.bias != nullptr) {
        const bool one_row = t.bias->ndim == 1 && t.bias->shape[0] == hidden && is_contiguous(*t.bias);
        if (one_row ? address_of(*t.bias) % static_cast<u64>(kRowAlignment) != 0 : !is_rows(*t.bias, tokens, hidden)) return false;
    }
    if (t.topk_weights != nullptr && !is_packed(*t.topk_weights, tokens, args_.ctx.shape.topk)) return false;
    if (overwrites(dispatch, t)) return false;
    if (t.weight_grads == nullptr) return true;
    return is_weight_grads(dispatch, *t.weight_grads) && weight_grads_.fits(t.out_weight_grads) &&
           is_packed(*t.out_weight_grads, tokens, args_.ctx.shape.topk);
}

std::optional<CombineArgs> CombinePlan::bind(const DispatchArgs& dispatch, const CombineTensors& t, u64 reduced_rows) const {
    const auto schedule = schedules_.find(dispatch.num_tokens);
    if (schedule == schedules_.end() || !fits(dispatch, t)) return std::nullopt;
    std::optional<CombineArgs> args(args_);
    args->route = dispatch.route;
    args->num_tokens = dispatch.num_tokens;
    args->chunk_tokens = dispatch.chunk_tokens;
    args->workers = schedule->second.workers;
    args->y = address_of(*t.y);
    args->y_stride = t.y->ndim == 3 ? args_.hidden * element_bytes(*t.y) : pitch_of(*t.y);
    args->reduced_rows = reduced_rows;
    args->out = address_of(*t.out);
    args->out_stride = pitch_of(*t.out);
    if (t.bias != nullptr) {
        args->bias = address_of(*t.bias);
        args->bias_stride = t.bias->ndim == 1 ? 0 : pitch_of(*t.bias);
    }
    // An empty tensor has no address, but the executor must still know that it was passed.
    const auto given = [](const DLTensor& tensor) { return address_of(tensor) != 0 ? address_of(tensor) : kRowAlignment; };
    if (t.topk_weights != nullptr) args->topk_weights = given(*t.topk_weights);
    if (t.weight_grads != nullptr) {
        args->weight_grads = given(*t.weight_grads);
        args->out_weight_grads = address_of(*t.out_weight_grads);
    }
    return args;
}

}  // namespace moecomm::runtime
