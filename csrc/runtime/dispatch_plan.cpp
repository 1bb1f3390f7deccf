#include "dispatch_plan.h"

#include <stdexcept>

#include "../protocol/domains.h"
#include "../protocol/slots.h"

namespace moecomm::runtime {
namespace {

constexpr DLDataType kInt32{0, 32, 1}, kInt64{0, 64, 1}, kUInt8{1, 8, 1}, kFloat32{2, 32, 1}, kFloat8{10, 8, 1};

constexpr i32 kOnHost = 1;  // DLPack's kDLCPU

// True if rows are cast to a format whose rows arrive as bytes.
bool casts_to_bytes(const DispatchArgs& args) { return args.quantize > 1; }

i32 experts_here(const DispatchArgs& args) { return expert_ranges(args.ctx.shape).count(args.ctx.rank); }
i32 most_experts(const DispatchArgs& args) { return expert_ranges(args.ctx.shape).count(0); }

// Carves consecutive pieces out of a block.
class Pieces {
  public:
    u64 take(u64 count, u64 bytes) {
        const u64 here = end_;
        end_ = align_up(here + count * bytes, Arena::kAlignment);
        return here;
    }
    u64 end() const { return end_; }

  private:
    u64 end_ = 0;
};

struct Payload {
    u64 scales, columns, x, bytes;
    i32 groups;
    i64 stride;
};

// The rows come last, so that the unused tail of the block can be freed.
Payload payload_of(const DispatchArgs& args, i32 max_rows, bool scale_columns, i32 experts) {
    const Shape& shape = args.ctx.shape;
    const bool batched = args.layout == static_cast<i32>(Layout::batched);
    const u64 tokens = static_cast<u64>(shape.ranks) * shape.max_tokens;
    Payload p{};
    Pieces pieces;
    p.scales = pieces.take(scale_columns ? tokens : max_rows, args.scale_bytes);
    if (scale_columns) {
        p.groups = batched ? experts : 1;
        p.stride = align_up<i64>(max_rows / p.groups, 4);  // a column is a multiple of 16 bytes, for TMA
        p.columns = pieces.take(static_cast<u64>(p.groups) * p.stride, args.scale_bytes);
    }
    // Kernels clamp the row of a descriptor to max_rows - 1 (row_inside). With max_rows=0 that is row -1: reserve one row before x, so that
    // the store stays in the block.
    const bool has_row_ahead = args.descriptors != 0 && max_rows == 0;
    p.x = has_row_ahead ? pieces.take(1, args.row_bytes) + args.row_bytes : pieces.take(max_rows, args.row_bytes);
    p.bytes = pieces.end();
    return p;
}

struct Kept {
    u64 src, topk_idx, weights, rows, token_rows, token_owner, token_slot, sent, ranges, forwarded, tokens_per_expert, rows_per_expert,
        num_rows, bytes;
};

Kept kept_of(const DispatchArgs& args, i32 max_rows, i32 experts) {
    const Shape& shape = args.ctx.shape;
    const bool flat = args.layout == static_cast<i32>(Layout::flat);
    const u64 ranks = shape.ranks, topk = shape.topk, tokens = shape.max_tokens;
    Kept k{};
    Pieces pieces;
    k.src = pieces.take(max_rows, 2 * sizeof(i32));
    k.topk_idx = pieces.take(flat ? max_rows : 0, topk * args.idx_bytes);
    k.weights = pieces.take(max_rows, (flat ? topk : 1) * sizeof(float));
    k.rows = pieces.take(flat ? 0 : ranks * tokens, topk * sizeof(i32));
    k.token_rows = pieces.take(tokens, topk * sizeof(i32));
    k.token_owner = pieces.take(tokens, topk * sizeof(i32));
    k.token_slot = pieces.take(tokens, ranks * sizeof(i32));
    k.sent = pieces.take(1, ranks * sizeof(SourceTokens) + route_tail(shape.ranks));
    k.ranges = pieces.take(ranks * tokens, sizeof(u32));
    k.forwarded = pieces.take(domains(shape) > 1 ? ranks * tokens : 0, forwarded_words(shape) * sizeof(i32));
    k.tokens_per_expert = pieces.take(experts, sizeof(i32));
    k.rows_per_expert = pieces.take(experts, sizeof(i64));
    k.num_rows = pieces.take(1, sizeof(i32));
    k.bytes = pieces.end();
    return k;
}

// Route::key, which differs between windows and sizes.
u64 key_of(const DispatchArgs& args) {
    u64 key = window_of(args.ctx, args.ctx.rank);
    for (const i32 word : {args.ctx.rank, args.layout, args.max_rows, args.num_tokens}) {
        key = (key ^ static_cast<u32>(word)) * 0x9e3779b97f4a7c15ull;
        key ^= key >> 29;
    }
    return key;
}

}  // namespace

DispatchPlan::DispatchPlan(const DispatchArgs& args, bool scale_columns, const DispatchInputs& like)
    : args_(args),
      scale_columns_(scale_columns),
      x_(like.x),
      scales_(like.scales),
      topk_idx_(like.topk_idx),
      topk_weights_(like.topk_weights) {}

u64 DispatchPlan::kept_bytes(i32 max_rows) const { return kept_of(args_, max_rows, experts_here(args_)).bytes; }
u64 DispatchPlan::payload_bytes(i32 max_rows) const { return payload_of(args_, max_rows, scale_columns_, experts_here(args_)).bytes; }
u64 DispatchPlan::largest_kept_bytes(i32 max_rows) const { return kept_of(args_, max_rows, most_experts(args_)).bytes; }
u64 DispatchPlan::largest_payload_bytes(i32 max_rows) const {
    return payload_of(args_, max_rows, scale_columns_, most_experts(args_)).bytes;
}

bool DispatchPlan::fits(const DispatchInputs& in) const {
    if (!x_.fits(in.x) || !scales_.fits(in.scales) || !topk_idx_.fits(in.topk_idx) || !topk_weights_.fits(in.topk_weights)) return false;
    const i64 tokens = in.x->ndim == 2 ? in.x->shape[0] : -1, topk = args_.ctx.shape.topk;
    if (tokens < 0 || tokens > args_.ctx.shape.max_tokens || !is_rows(*in.x, tokens, args_.hidden)) return false;
    if (in.scales != nullptr && args_.quantize != 0 && !is_packed(*in.scales, 1, 1)) return false;
    if (in.scales != nullptr && args_.quantize == 0 && !is_matrix(*in.scales, tokens, args_.scale_bytes / element_bytes(*in.scales)))
        return false;
    if (in.topk_idx != nullptr && !is_packed(*in.topk_idx, tokens, topk)) return false;
    return in.topk_weights == nullptr || is_packed(*in.topk_weights, tokens, topk);
}

std::optional<DispatchArgs> DispatchPlan::with_inputs(const DispatchInputs& in) const {
    if (!fits(in)) return std::nullopt;
    const i32 tokens = static_cast<i32>(in.x->shape[0]);
    const auto schedule = schedules_.find(tokens);
    if (schedule == schedules_.end()) return std::nullopt;
    std::optional<DispatchArgs> args(args_);
    args->x = address_of(*in.x);
    args->x_stride = pitch_of(*in.x);
    args->num_tokens = tokens;
    if (in.scales != nullptr && args_.quantize != 0 && scales_.device().device_type == kOnHost) {
        const u32 bits = *reinterpret_cast<const u32*>(address_of(*in.scales));
        args->in_scales_stride = bits;
        args->call = compare_scale(args->call, bits);
    } else if (in.scales != nullptr) {
        args->in_scales = address_of(*in.scales);
        args->in_scales_stride = pitch_of(*in.scales);
        if (args_.quantize != 0) args->compared = args->in_scales;
    }
    if (in.topk_idx != nullptr) args->topk_idx = address_of(*in.topk_idx);
    if (in.topk_weights != nullptr) args->topk_weights = address_of(*in.topk_weights);
    args->workers = schedule->second.workers;
    args->chunk_tokens = schedule->second.chunk_tokens;
    return args;
}

void DispatchPlan::place_payload(DispatchArgs& args, const Block& payload) const {
    const Payload p = payload_of(args, args.max_rows, scale_columns_, experts_here(args));
    args.out_x = payload.offset() + p.x;
    if (args.scale_bytes != 0) args.out_scales = payload.offset() + p.scales;
    if (!scale_columns_) return;
    args.scale_columns = window_of(args.ctx, args.ctx.rank) + payload.offset() + p.columns;
    args.scale_stride = p.stride;
}

void DispatchPlan::place_kept(DispatchArgs& args, const Block& kept) const {
    const Kept k = kept_of(args, args.max_rows, experts_here(args));
    const u64 at = kept.offset(), base = window_of(args.ctx, args.ctx.rank) + at;
    const bool flat = args.layout == static_cast<i32>(Layout::flat);
    args.out_src = at + k.src;
    args.out_weights = at + k.weights;
    if (flat) args.out_topk_idx = at + k.topk_idx;
    if (!flat) args.out_rows = at + k.rows;
    args.tokens_per_expert = base + k.tokens_per_expert;
    args.rows_per_expert = base + k.rows_per_expert;
    args.num_rows = base + k.num_rows;
    const u64 forwarded = domains(args.ctx.shape) > 1 ? base + k.forwarded : 0;
    args.route = {
        base + k.token_rows,         base + k.token_owner, base + k.token_slot, base + k.sent, base + k.ranges, flat ? 0 : base + k.rows,
        flat ? 0 : base + k.weights, base + k.src,         forwarded,           key_of(args),  args.max_rows,   0};
}

std::optional<DispatchArgs> DispatchPlan::bind(const Block& payload, const Block& kept, i32 max_rows, const DispatchInputs& inputs) const {
    auto args = with_inputs(inputs);
    if (!args) return args;
    args->max_rows = max_rows;
    place_payload(*args, payload);
    place_kept(*args, kept);
    return args;
}

void DispatchPlan::require_as_given(const DispatchArgs& args, Layout layout) const {
    if (args.layout != static_cast<i32>(layout) || args.quantize == 1 || scale_columns_)
        throw std::invalid_argument("not rows of this layout as they were given, or as bytes");
}

Output DispatchPlan::rows_output(const DispatchArgs& args) const {
    const DLDataType type = casts_to_bytes(args) ? kUInt8 : args.quantize != 0 ? kFloat8 : x_.type();
    std::vector<i64> shape{args.max_rows, casts_to_bytes(args) ? args.row_bytes : args.hidden};
    if (args.layout == static_cast<i32>(Layout::batched)) {
        const i64 experts = experts_here(args);
        shape = {experts, args.max_rows / experts, shape[1]};
    }
    return {window_of(args.ctx, args.ctx.rank) + args.out_x, shape, type};
}

std::optional<Output> DispatchPlan::scales_as_given(const DispatchArgs& args) const {
    if (args.scale_bytes == 0) return std::nullopt;
    const DLDataType type = casts_to_bytes(args) ? kUInt8 : scales_.type();
    return Output{window_of(args.ctx, args.ctx.rank) + args.out_scales, {args.max_rows, args.scale_bytes / (type.bits / 8)}, type};
}

FlatOutputs DispatchPlan::flat_outputs(const DispatchArgs& args) const {
    require_as_given(args, Layout::flat);
    const u64 base = window_of(args.ctx, args.ctx.rank);
    const i64 rows = args.max_rows, topk = args.ctx.shape.topk;
    return {rows_output(args),
            scales_as_given(args),
            {base + args.out_topk_idx, {rows, topk}, topk_idx_.type()},
            {base + args.out_weights, {rows, topk}, kFloat32}};
}

ExpertOutputs DispatchPlan::expert_outputs(const DispatchArgs& args) const {
    require_as_given(args, Layout::expert);
    const i64 experts = experts_here(args);
    return {rows_output(args),
            scales_as_given(args),
            {window_of(args.ctx, args.ctx.rank) + args.out_weights, {args.max_rows}, kFloat32},
            {args.rows_per_expert, {experts}, kInt64}};
}

LayerOutputs DispatchPlan::layer_outputs(const DispatchArgs& args) const {
    const Output counts{args.tokens_per_expert, {experts_here(args)}, kInt32};
    if (args.quantize != 1) {
        require_as_given(args, Layout::expert);
        return {rows_output(args), scales_as_given(args), counts};
    }
    if (args.layout != static_cast<i32>(Layout::expert) || args.scale_format != 0 || args.scale_columns != 0)
        throw std::invalid_argument("not rows that an expert layer takes");
    const u64 base = window_of(args.ctx, args.ctx.rank);
    const i64 columns = args.scale_bytes / static_cast<i64>(sizeof(float));
    return {rows_output(args), Output{base + args.out_scales, {args.max_rows, columns}, kFloat32}, counts};
}

BatchedOutputs DispatchPlan::batched_outputs(const DispatchArgs& args) const {
    if (args.layout != static_cast<i32>(Layout::batched)) throw std::invalid_argument("not batched rows");
    return {rows_output(args), {args.tokens_per_expert, {experts_here(args)}, kInt32}};
}

TableOutputs DispatchPlan::table_outputs(const DispatchArgs& args) const {
    const u64 base = window_of(args.ctx, args.ctx.rank);
    const i64 rows = args.max_rows, experts = experts_here(args), topk = args.ctx.shape.topk;
    std::vector<i64> shape{rows};
    if (args.layout == static_cast<i32>(Layout::batched)) shape = {experts, rows / experts};
    std::vector<i64> pairs = shape;
    pairs.push_back(2);
    TableOutputs out{{base + args.out_weights, shape, kFloat32},
                     {base + args.out_src, pairs, kInt32},
                     {args.tokens_per_expert, {experts}, kInt32},
                     {args.num_rows, {1}, kInt32},
                     std::nullopt};
    if (args.layout != static_cast<i32>(Layout::flat)) return out;
    out.weights.shape = {rows, topk};
    out.topk_idx = Output{base + args.out_topk_idx, {rows, topk}, topk_idx_.type()};
    return out;
}

std::optional<DispatchArgs> DispatchPlan::repeat(const Block& payload, const DispatchArgs& earlier, const DispatchInputs& inputs) const {
    auto args = with_inputs(inputs);
    if (!args || args->num_tokens != earlier.num_tokens) return std::nullopt;
    args->route = earlier.route;
    args->tokens_per_expert = earlier.tokens_per_expert;  // a repeat reads it, to count rows
    args->max_rows = earlier.max_rows;
    args->chunk_tokens = earlier.chunk_tokens;  // route.sent counts chunks of this size
    place_payload(*args, payload);
    return args;
}

}  // namespace moecomm::runtime
