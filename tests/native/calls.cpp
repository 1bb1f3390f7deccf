// A scenario as the calls that ranks make.
#include <algorithm>
#include <cstring>

#include "host/executor.h"
#include "host/round.h"
#include "scenario.h"

namespace moecomm::test {

namespace {

template <class T>
u64 address(const std::vector<T>& v) {
    return v.empty() ? 0 : reinterpret_cast<u64>(v.data());
}

Route route_of(const Cluster& cluster, const ReceiveBuffer& l, i32 rank) {
    const u64 base = reinterpret_cast<u64>(cluster.base(rank));
    return {reinterpret_cast<u64>(l.token_rows.data()),
            reinterpret_cast<u64>(l.token_owner.data()),
            reinterpret_cast<u64>(l.token_slot.data()),
            address(l.sent),
            address(l.ranges),
            l.rows != 0 ? base + l.rows : 0,
            base + l.weights,
            base + l.src,
            address(l.relayed),
            7,
            l.max_rows,
            0};
}

// Anything that ranks must have passed alike.
u64 call_of(const Dispatched& d) {
    return static_cast<u64>(d.layout) * 1000003u + d.row_bytes * 101u + d.scale_bytes * 4u + d.scale_columns * 2u;
}

}  // namespace

void place_outputs(const Scenario& scenario, Cluster& cluster) {
    const Shape& s = scenario.shape;
    for (const auto& d : scenario.dispatches) {
        for (i32 rank = 0; rank < s.ranks; ++rank) {
            ReceiveBuffer& l = d->receive_buffer[rank];
            const i64 rows = l.max_rows, tokens = d->input[rank].tokens;
            l.x = cluster.output(rank, rows * d->row_bytes);
            l.scales = cluster.output(rank, (d->scale_columns ? static_cast<i64>(s.ranks) * s.max_tokens : rows) * d->scale_bytes);
            // One more, so that it has an address and an end to look behind.
            if (d->scale_columns) l.scale_columns.assign(scale_groups(s, *d, rank) * (d->scale_bytes / 4) * l.scale_stride + 1, kUnset);
            if (d->repeats != nullptr) continue;
            l.src = cluster.output(rank, rows * 8);
            l.topk_idx = d->layout == Layout::flat ? cluster.output(rank, rows * s.topk * d->idx_bytes) : 0;
            l.weights = cluster.output(rank, rows * 4 * (d->layout == Layout::flat ? s.topk : 1));
            l.rows = d->layout == Layout::flat ? 0 : cluster.output(rank, static_cast<i64>(s.ranks) * s.max_tokens * s.topk * 4);
            l.token_rows.assign(tokens * s.topk, kUnset);
            l.token_owner.assign(tokens * s.topk, kUnset);
            l.token_slot.assign(tokens * s.ranks, kUnset);
            l.relayed.assign(domains(s) > 1 ? s.ranks * s.max_tokens * forwarded_words(s) : 0, kUnset);
            l.sent.assign(s.ranks + route_tail(s.ranks) / sizeof(SourceTokens), {kUnset, kUnset});
            l.ranges.assign(static_cast<i64>(s.ranks) * s.max_tokens, kUnset);
            l.tokens_per_expert.assign(experts_of(s, rank).count, kUnset);
            l.rows_per_expert.assign(experts_of(s, rank).count, kUnset);
            l.num_rows.assign(1, kUnset);
        }
    }
    for (const auto& c : scenario.combines) {
        for (i32 rank = 0; rank < s.ranks; ++rank) {
            Combined::Part& part = c->parts[rank];
            if (!part.y_in_window || part.y.empty()) continue;
            part.y_at = cluster.output(rank, part.y.size());
        }
    }
}

void place_rows(const Cluster& cluster, const Combined& c, i32 rank) {
    const Combined::Part& part = c.parts[rank];
    if (part.y_at != 0) std::memcpy(cluster.base(rank) + part.y_at, part.y.data(), part.y.size());
}

DispatchArgs dispatch_args(const Cluster& cluster, Dispatched& d, i32 rank) {
    const Input& sent = d.input[rank];
    const ReceiveBuffer& l = d.receive_buffer[rank];
    const ReceiveBuffer& first = d.repeats != nullptr ? d.repeats->receive_buffer[rank] : l;
    DispatchArgs a{};
    a.ctx = cluster.context(rank);
    a.route = route_of(cluster, first, rank);
    a.x = address(sent.x);
    a.in_scales = address(sent.scales);
    a.x_stride = sent.x_stride;
    a.in_scales_stride = sent.scales_stride;
    a.num_tokens = sent.tokens;
    a.idx_bytes = d.idx_bytes;
    a.hidden = d.hidden;
    a.in_type = static_cast<i32>(d.in_type);
    a.row_bytes = d.row_bytes;
    a.scale_bytes = d.scale_bytes;
    a.quantize = d.quantize;
    a.scale_format = static_cast<i32>(d.scale_format);
    a.layout = static_cast<i32>(d.layout);
    a.alignment = d.alignment;
    a.max_rows = l.max_rows;
    a.chunk_tokens = sent.chunk_tokens;
    a.workers = sent.workers;
    a.repeat = d.repeats != nullptr;
    a.call = call_of(d) + static_cast<u64>(a.repeat);
    a.check_weights = 1;
    a.out_x = l.x;
    a.out_scales = d.scale_bytes > 0 ? l.scales : 0;
    a.scale_columns = address(l.scale_columns);
    a.scale_stride = l.scale_stride;
    if (d.repeats != nullptr) {
        a.tokens_per_expert = address(first.tokens_per_expert);
        return a;
    }
    a.topk_idx = d.idx_bytes == 8 ? address(sent.ids) : address(sent.ids32);
    a.topk_weights = d.weighted ? address(sent.weights) : 0;
    a.out_src = l.src;
    a.out_topk_idx = l.topk_idx;
    a.out_weights = l.weights;
    a.out_rows = l.rows;
    a.tokens_per_expert = address(l.tokens_per_expert);
    a.rows_per_expert = address(l.rows_per_expert);
    a.num_rows = address(l.num_rows);
    return a;
}

CombineArgs combine_args(const Cluster& cluster, Combined& c, i32 rank) {
    Combined::Part& part = c.parts[rank];
    const Dispatched& d = *c.routed;
    const ReceiveBuffer& l = d.repeats != nullptr ? d.repeats->receive_buffer[rank] : d.receive_buffer[rank];
    CombineArgs a{};
    a.ctx = cluster.context(rank);
    a.route = route_of(cluster, l, rank);
    a.y = part.y_at != 0 ? reinterpret_cast<u64>(cluster.base(rank)) + part.y_at : address(part.y);
    a.bias = c.bias ? address(part.bias) : 0;
    a.weight_grads = !c.grads ? 0 : part.grads.empty() ? 16 : address(part.grads);  // a rank without rows forwards those of others
    a.topk_weights = !c.own_weights ? 0 : part.weights.empty() ? 16 : address(part.weights);
    a.y_stride = part.y_stride;
    a.bias_stride = part.bias_stride;
    a.num_tokens = d.input[rank].tokens;
    a.hidden = d.hidden;
    a.type = static_cast<i32>(c.type);
    a.bias_type = static_cast<i32>(c.bias_type);
    a.wire = static_cast<i32>(c.wire);
    a.layout = static_cast<i32>(d.layout);
    a.weighted = c.weighted;
    a.call = call_of(d) + 7;
    a.workers = part.workers;
    a.chunk_tokens = d.input[rank].chunk_tokens;
    a.out = address(part.out);
    a.out_weight_grads = c.grads ? address(part.out_grads) : 0;
    a.out_stride = part.out_stride;
    return a;
}

void begin_near_wrap(const Cluster& cluster, u64 seed) {
    const u32 begun = seed % 2 == 0 ? 0 : (1u << 31) - 3 - seed / 2 % 4;
    for (i32 rank = 0; rank < cluster.shape.ranks; ++rank) host::Round::state_of(cluster.context(rank)).round = begun;
}

void run_step(const Cluster& cluster, const Step& step, i32 rank) {
    if (step.dispatch != nullptr) {
        Dispatched& d = *step.dispatch;
        DispatchArgs args = dispatch_args(cluster, d, rank);
        args.part = static_cast<i32>(step.part);
        host::dispatch(args);
        if (step.part == Part::begin) d.begun[rank] = d.receive_buffer[rank];
    }
    if (step.combine == nullptr) return;
    place_rows(cluster, *step.combine, rank);
    host::combine(combine_args(cluster, *step.combine, rank));
    const Combined::Part& part = step.combine->parts[rank];  // its rows are the caller's again, who writes others at once
    if (part.y_at != 0) std::fill_n(cluster.base(rank) + part.y_at, part.y.size(), kUntouched);
}

}  // namespace moecomm::test
