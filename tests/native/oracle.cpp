#include "oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numbers.h"

namespace moecomm::test {

namespace {

template <class T>
void put(std::vector<u8>& bytes, i64 index, T value) {
    std::memcpy(&bytes[index * sizeof(T)], &value, sizeof(T));
}

// The scales of group `first` .. `end` of a row, as bytes at `scale`; returns what its values are multiplied with.
float scale_group(const Dispatched& d, const u8* x, i32 first, i32 end, u8* scale) {
    float amax = 1e-4f;
    for (i32 i = first; i < end; ++i) amax = std::max(amax, std::fabs(value_at(x, d.in_type, i)));
    const float exact = amax / 448.0f;
    if (d.scale_format == ScaleFormat::ue8m0) {
        *scale = ue8m0_above(exact);
        return *scale == 255 ? 0.0f : static_cast<float>(std::ldexp(1.0, 127 - *scale));
    }
    std::memcpy(scale, &exact, 4);
    return (1.0f / amax) * 448.0f;
}

// One token's row as it arrives.  Returns its scales.
std::vector<u8> put_row(const Dispatched& d, const Input& sent, i32 token, Arrived& to, i64 row) {
    const u8* x = &sent.x[token * sent.x_stride];
    u8* out = &to.x[row * d.row_bytes];
    std::vector<u8> scales(d.scale_bytes, 0);
    if (!d.quantize) {
        std::memcpy(out, x, d.row_bytes);
        if (d.scale_bytes > 0) std::memcpy(scales.data(), &sent.scales[token * sent.scales_stride], d.scale_bytes);
        return scales;
    }
    const i32 bytes_a_scale = d.scale_format == ScaleFormat::ue8m0 ? 1 : 4;
    for (i32 first = 0; first < d.hidden; first += 128) {
        const i32 end = std::min(first + 128, d.hidden);
        const float up = scale_group(d, x, first, end, &scales[first / 128 * bytes_a_scale]);
        for (i32 i = first; i < end; ++i) out[i] = e4m3_nearest(value_at(x, d.in_type, i) * up);
    }
    return scales;
}

// One token's row and scales as they arrive: beside the row, or by flat row (`slot`) and in the columns of the row.
void put_payload(const Shape& s, const Dispatched& d, i32 source, i32 token, i32 p, Routed& out, i64 row) {
    Arrived& to = out.arrived[p];
    const std::vector<u8> scales = put_row(d, d.input[source], token, to, row);
    const i64 slot = out.slot[source][token * s.ranks + p];
    if (d.scale_bytes > 0) std::memcpy(&to.scales[(d.scale_columns ? slot : row) * d.scale_bytes], scales.data(), d.scale_bytes);
    if (!d.scale_columns) return;
    const i64 places = d.receive_buffer[p].max_rows / scale_groups(s, d, p), words = d.scale_bytes / 4;
    for (i64 w = 0; w < words; ++w)
        std::memcpy(&to.scale_columns[(row / places * words + w) * d.receive_buffer[p].scale_stride + row % places], &scales[4 * w], 4);
}

Arrived untouched(const Shape& s, const Dispatched& d, i32 rank) {
    const i64 rows = d.receive_buffer[rank].max_rows, flat_rows = static_cast<i64>(s.ranks) * s.max_tokens;
    const bool flat = d.layout == Layout::flat;
    Arrived a;
    a.x.assign(rows * d.row_bytes, kUntouched);
    a.scales.assign((d.scale_columns ? flat_rows : rows) * d.scale_bytes, kUntouched);
    a.scale_columns.assign(d.receive_buffer[rank].scale_columns.size(), kUnset);
    a.src.assign(rows * 8, kUntouched);
    a.weights.assign(rows * 4 * (flat ? s.topk : 1), kUntouched);
    if (flat) a.topk_idx.assign(rows * s.topk * d.idx_bytes, kUntouched);
    if (!flat) a.rows.assign(flat_rows * s.topk * 4, kUntouched);
    a.tokens_per_expert.assign(experts_of(s, rank).count, 0);
    a.rows_per_expert.assign(experts_of(s, rank).count, 0);
    for (const Input& input : d.input) a.sent.push_back({input.tokens, input.chunk_tokens});
    a.ranges.assign(flat_rows, kUnset);
    return a;
}

float weight_of(const Dispatched& d, const Input& sent, i64 entry) { return d.weighted ? sent.weights[entry] : 1.0f; }

// The flat rows of a rank: tokens with an expert there, by source and token.
void arrive_flat(const Shape& s, const Dispatched& d, i32 p, Routed& out) {
    const OfRank of = experts_of(s, p);
    const auto at_p = [&](i64 id) { return id >= of.first && id < of.first + of.count; };
    Arrived& a = out.arrived[p];
    i32 row = 0;
    for (i32 source = 0; source < s.ranks; ++source) {
        const Input& sent = d.input[source];
        for (i32 token = 0; token < sent.tokens; ++token) {
            bool any = false;
            for (i32 k = 0; k < s.topk; ++k) any = any || at_p(sent.ids[token * s.topk + k]);
            out.slot[source][token * s.ranks + p] = any ? row : -1;
            if (!any) continue;
            for (i32 k = 0; k < s.topk; ++k) {
                const i64 entry = token * s.topk + k, id = sent.ids[entry];
                const bool mine = at_p(id);
                if (mine) out.owner[source][entry] = p;
                if (d.layout != Layout::flat) {
                    put<i32>(a.rows, row * s.topk + k, -1);
                    continue;
                }
                if (mine) out.row[source][entry] = row;
                const i64 local = mine ? id - of.first : -1;
                d.idx_bytes == 8 ? put<i64>(a.topk_idx, row * s.topk + k, local)
                                 : put<i32>(a.topk_idx, row * s.topk + k, static_cast<i32>(local));
                put<float>(a.weights, row * s.topk + k, mine ? weight_of(d, sent, entry) : 0.0f);
            }
            if (d.layout == Layout::flat) {
                put_payload(s, d, source, token, p, out, row);
                put<i32>(a.src, 2 * row, source);
                put<i32>(a.src, 2 * row + 1, token);
            }
            u32& range = a.ranges[source * s.max_tokens + token / sent.chunk_tokens];
            if (range == kUnset) range = static_cast<u32>(chunk_signal(0, row, 0));
            ++range;
            ++row;
        }
        for (i32 chunk = 0; chunk * sent.chunk_tokens < sent.tokens; ++chunk)
            if (u32& range = a.ranges[source * s.max_tokens + chunk]; range == kUnset) range = 0;
    }
    if (d.layout == Layout::flat) a.num_rows = row;
}

// The rows of one expert: tokens that chose it, by source, token and k.
i64 arrive_expert(const Shape& s, const Dispatched& d, i32 expert, i64 start, Routed& out) {
    const i32 p = owner_of(s, expert), local = expert - experts_of(s, p).first;
    Arrived& a = out.arrived[p];
    i64 row = start;
    for (i32 source = 0; source < s.ranks; ++source) {
        const Input& sent = d.input[source];
        for (i32 token = 0; token < sent.tokens; ++token) {
            for (i32 k = 0; k < s.topk; ++k) {
                const i64 entry = token * s.topk + k;
                if (sent.ids[entry] != expert) continue;
                ++a.tokens_per_expert[local];
                ++a.rows_per_expert[local];
                if (d.layout == Layout::flat) continue;
                put_payload(s, d, source, token, p, out, row);
                put<i32>(a.src, 2 * row, source);
                put<i32>(a.src, 2 * row + 1, token);
                put<float>(a.weights, row, weight_of(d, sent, entry));
                put<i32>(a.rows, out.slot[source][token * s.ranks + p] * s.topk + k, static_cast<i32>(row));
                out.row[source][entry] = static_cast<i32>(row++);
            }
        }
    }
    return row;
}

void arrive_experts(const Shape& s, const Dispatched& d, i32 p, Routed& out) {
    const OfRank of = experts_of(s, p);
    Arrived& a = out.arrived[p];
    i64 start = 0;
    for (i32 local = 0; local < of.count; ++local) {
        if (d.layout == Layout::batched) start = static_cast<i64>(local) * (d.receive_buffer[p].max_rows / of.count);
        const i64 end = arrive_expert(s, d, of.first + local, start, out);
        if (d.layout == Layout::batched) a.num_rows += a.tokens_per_expert[local];
        if (d.layout != Layout::expert) continue;
        for (start = end; start % d.alignment != 0; ++start) {
            ++a.rows_per_expert[local];
            put<i32>(a.src, 2 * start, -1);
            put<i32>(a.src, 2 * start + 1, -1);
            put<float>(a.weights, start, 0.0f);
        }
        a.num_rows = static_cast<i32>(start);
    }
}

// As it travels.
float rounded(Type wire, float sum) {
    u8 bytes[4];
    store_nearest(bytes, wire, 0, sum);
    return value_at(bytes, wire, 0);
}

// Return the sum of a token's rows at rank `p`, as it travels.
float partial(const Shape& s, const Combined& c, const Routed& routed, i32 rank, i32 token, i32 p, i32 column) {
    const Dispatched& d = *c.routed;
    const Combined::Part& part = c.parts[p];
    if (d.layout == Layout::flat) return value_at(&part.y[routed.slot[rank][token * s.ranks + p] * part.y_stride], c.type, column);
    float sum = 0.0f;
    for (i32 k = 0; k < s.topk; ++k) {
        const i64 entry = token * s.topk + k;
        if (routed.owner[rank][entry] != p) continue;
        const float y = value_at(&part.y[routed.row[rank][entry] * part.y_stride], c.type, column);
        const float weight = c.own_weights ? c.parts[rank].weights[entry] : weight_of(d, d.input[rank], entry);
        const float scaled = c.weighted ? weight * y : y;
        sum = sum + scaled;
    }
    return rounded(c.wire, sum);
}

// The rows of a token over the ranks of each domain, then over the domains; what comes from another domain, as it travels.
float total(const Shape& s, const Combined& c, const Routed& routed, i32 rank, i32 token, i32 column) {
    float sum = 0.0f;
    for (i32 domain = 0; domain < domains(s); ++domain) {
        float here = 0.0f;
        bool any = false;
        for (i32 p = domain * domain_ranks(s); p < (domain + 1) * domain_ranks(s); ++p) {
            if (routed.slot[rank][token * s.ranks + p] < 0) continue;
            here = here + partial(s, c, routed, rank, token, p, column);
            any = true;
        }
        if (any) sum = sum + (domain == domain_of(s, rank) ? here : rounded(c.wire, here));
    }
    return sum;
}

}  // namespace

Routed expect_dispatch(const Shape& s, const Dispatched& d) {
    Routed out;
    for (i32 rank = 0; rank < s.ranks; ++rank) {
        out.arrived.push_back(untouched(s, d, rank));
        out.row.emplace_back(d.input[rank].tokens * s.topk, -1);
        out.owner.emplace_back(d.input[rank].tokens * s.topk, -1);
        out.slot.emplace_back(d.input[rank].tokens * s.ranks, -1);
    }
    for (i32 p = 0; p < s.ranks; ++p) {
        arrive_flat(s, d, p, out);
        const i32 flat_rows = out.arrived[p].num_rows;
        arrive_experts(s, d, p, out);
        if (d.layout == Layout::flat) out.arrived[p].num_rows = flat_rows;
    }
    return out;
}

SourceReduce expect_combine(const Shape& s, const Combined& c, const Routed& routed, i32 rank) {
    const Combined::Part& part = c.parts[rank];
    const Dispatched& d = *c.routed;
    SourceReduce source_rank;
    source_rank.out.assign(part.out.size(), kUntouched);
    for (i32 token = 0; token < d.input[rank].tokens; ++token) {
        for (i32 column = 0; column < d.hidden; ++column) {
            float sum = total(s, c, routed, rank, token, column);
            if (c.bias) sum = sum + value_at(&part.bias[token * part.bias_stride], c.bias_type, column);
            store_nearest(&source_rank.out[token * part.out_stride], c.type, column, sum);
        }
        for (i32 k = 0; c.grads && k < s.topk; ++k) {
            const i64 entry = token * s.topk + k;
            const i32 p = routed.owner[rank][entry];
            const bool flat = d.layout == Layout::flat;
            const i64 at = p < 0  ? 0
                           : flat ? static_cast<i64>(routed.slot[rank][token * s.ranks + p]) * s.topk + k
                                  : routed.row[rank][entry];
            source_rank.grads.push_back(p < 0 ? 0.0f : c.parts[p].grads[at]);
        }
    }
    return source_rank;
}

}  // namespace moecomm::test
