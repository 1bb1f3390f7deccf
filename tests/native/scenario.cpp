#include "scenario.h"

#include <algorithm>
#include <cstring>

#include "numbers.h"

namespace moecomm::test {

namespace {

// Mostly two of two, two of four and four of two; else, too, domains of one rank, of all ranks, and between.
void random_domains(Random& random, Shape& s) {
    const i32 domains_and_ranks[][2] = {{2, 2}, {2, 4}, {4, 2}, {3, 1}, {1, 4}, {2, 1}, {3, 2}};
    const auto& chosen = domains_and_ranks[random.once_in(8) ? random.between(3, 6) : random.between(0, 2)];
    s.domain_ranks = chosen[1];
    s.ranks = chosen[0] * chosen[1];
}

Shape random_shape(Random& random, const Limits& limits) {
    Shape s{};
    s.ranks = limits.fixed_ranks != 0 ? limits.fixed_ranks : random.between(1, limits.ranks);
    s.domain_ranks = limits.fixed_domain_ranks;
    if (limits.several_domains) random_domains(random, s);
    s.slots = s.ranks * random.between(1, 4);
    s.topk = random.once_in(10) ? random.between(9, kMaxTopk) : random.between(1, 8);
    s.max_tokens = random.once_in(20) ? random.between(30, 70) : random.between(1, 20);
    s.ring_tokens = kMaxChunk * random.one_of({1, 1, 1, 2, 3});
    if (random.once_in(limits.several_domains ? 4 : 12)) {  // several times around the ring
        s.max_tokens = random.between(100, 300);
        s.topk = random.between(1, 4);
        if (limits.fixed_ranks == 0 && !limits.several_domains) s.ranks = random.between(1, 4);
        s.slots = s.ranks * random.between(1, 2);
    }
    if (limits.fixed_ranks == 0 && random.once_in(3)) s.slots += random.between(0, s.ranks - 1);  // some ranks have one more
    if (limits.fixed_tokens != 0) s.max_tokens = limits.fixed_tokens;
    return s;
}

i32 random_hidden(Random& random, const Shape& s) {
    if (s.max_tokens >= 100) return 16;
    if (random.once_in(40)) return 16 * random.between(66, 140);  // several blocks of columns
    return 16 * (random.once_in(3) ? random.between(1, 20) : random.between(1, 4));
}

// A value near 1 of either sign, with all its digits.
void store_random(Random& random, u8* row, Type type, i32 i) {
    const u64 bits = random.next();
    const u32 exponent = 122 + bits % 8, sign = bits >> 63;
    if (type == Type::fp32) {
        const u32 v = sign << 31 | exponent << 23 | (static_cast<u32>(bits >> 20) & 0x7fffffu);
        std::memcpy(row + 4 * i, &v, 4);
    } else if (type == Type::e4m3) {
        row[i] = static_cast<u8>(bits >> 20);
    } else {
        const u32 v = type == Type::bf16 ? exponent << 7 | (bits >> 20 & 0x7f) : (exponent - 112) << 10 | (bits >> 20 & 0x3ff);
        const u16 half = static_cast<u16>(sign << 15 | v);
        std::memcpy(row + 2 * i, &half, 2);
    }
}

// Very large and very small values, -0 and infinity.
void store_extreme(Random& random, u8* row, Type type, i32 i) {
    const float value = std::ldexp(random.value(), random.between(-30, 30));
    store_nearest(row, type, i, random.once_in(9) ? -0.0f : random.once_in(9) ? INFINITY : value);
}

std::vector<u8> random_rows(Random& random, i32 rows, i64 stride, i32 hidden, Type type) {
    std::vector<u8> bytes(rows * stride, kUntouched);
    const bool extreme = random.once_in(12);
    for (i32 row = 0; row < rows; ++row)
        for (i32 i = 0; i < hidden; ++i) (extreme ? store_extreme : store_random)(random, &bytes[row * stride], type, i);
    return bytes;
}

// Routing of one rank: usually uniform, sometimes everything to few experts; entries may repeat and may be -1.
std::vector<i64> random_ids(Random& random, const Shape& s, i32 tokens, i32 hot) {
    std::vector<i64> ids;
    const i32 holes = random.one_of({0, 0, 2, 8});
    for (i32 i = 0; i < tokens * s.topk; ++i) {
        const bool hole = holes != 0 && random.once_in(holes);
        ids.push_back(hole ? -1 : hot >= 0 && !random.once_in(8) ? hot : random.between(0, s.slots - 1));
    }
    return ids;
}

Input random_sent(Random& random, const Shape& s, const Dispatched& d, const Limits& limits, i32 hot) {
    Input sent{};
    sent.tokens = random.once_in(6) ? 0 : random.once_in(4) ? s.max_tokens : random.between(0, s.max_tokens);
    sent.chunk_tokens = 1 << random.between(0, 5);
    static_assert(kMaxChunk == 1 << 5, "all sizes of a chunk");
    sent.workers = random.once_in(4) ? random.between(1, limits.workers) : 1;
    sent.x_stride = align_up(d.hidden * size_of(d.in_type), 16) + 16 * random.between(0, 2);
    sent.x = random_rows(random, sent.tokens, sent.x_stride, d.hidden, d.in_type);
    if (d.scale_bytes > 0 && !d.quantize) {
        sent.scales_stride = d.scale_bytes + random.between(0, 3);
        for (i64 i = 0; i < sent.tokens * sent.scales_stride; ++i) sent.scales.push_back(static_cast<u8>(random.next()));
    }
    sent.ids = random_ids(random, s, sent.tokens, hot);
    sent.ids32.assign(sent.ids.begin(), sent.ids.end());
    for (size_t i = 0; d.weighted && i < sent.ids.size(); ++i) sent.weights.push_back(random.value());
    return sent;
}

std::unique_ptr<Dispatched> random_dispatch(Random& random, const Shape& s, const Limits& limits, i32 hidden) {
    auto d = std::make_unique<Dispatched>();
    d->layout = static_cast<Layout>(random.between(0, 2));
    d->in_type = static_cast<Type>(random.between(0, 3));
    d->quantize = d->in_type != Type::e4m3 && random.once_in(4);
    d->weighted = !random.once_in(4);
    d->hidden = hidden;
    d->row_bytes = d->quantize ? hidden : hidden * size_of(d->in_type);
    d->scale_format = static_cast<ScaleFormat>(random.between(0, 1));
    const i32 bytes_a_scale = d->scale_format == ScaleFormat::ue8m0 ? 1 : 4;
    d->scale_bytes = d->quantize ? ceil_div(hidden, kQuantGroup) * bytes_a_scale : random.once_in(3) ? random.between(1, 9) : 0;
    d->scale_columns = d->scale_bytes > 0 && random.once_in(2);
    if (d->scale_columns) d->scale_bytes = align_up(d->scale_bytes, 4);
    d->alignment = d->layout == Layout::expert && random.once_in(2) ? random.one_of({2, 8, 16, 5}) : 1;
    d->idx_bytes = random.one_of({4, 8});
    const i32 hot = random.once_in(5) ? random.between(0, s.slots - 1) : -1;
    for (i32 rank = 0; rank < s.ranks; ++rank) d->input.push_back(random_sent(random, s, *d, limits, hot));
    for (i32 rank = 0; rank < s.ranks; ++rank) {
        ReceiveBuffer receive_buffer;
        receive_buffer.max_rows = static_cast<i32>(rows_needed(s, *d, rank));
        if (d->layout == Layout::batched) {
            const i32 here = experts_of(s, rank).count, worst = s.ranks * s.max_tokens;
            receive_buffer.max_rows = here * std::max(receive_buffer.max_rows / here, random.one_of({0, random.between(0, worst), worst}));
        } else {
            receive_buffer.max_rows += random.one_of({0, 0, 3});
        }
        receive_buffer.scale_stride = align_up<i64>(receive_buffer.max_rows / scale_groups(s, *d, rank), 4) + 4 * random.between(0, 1);
        d->receive_buffer.push_back(receive_buffer);
    }
    return d;
}

// The same route again, with other rows.
std::unique_ptr<Dispatched> random_repeat(Random& random, const Dispatched& first) {
    auto d = std::make_unique<Dispatched>(first);
    d->repeats = first.repeats != nullptr ? first.repeats : &first;
    d->begun.clear();
    for (Input& sent : d->input) sent.x = random_rows(random, sent.tokens, sent.x_stride, d->hidden, d->in_type);
    return d;
}

// The batched layout may get more of one expert than it has room for, when a token names it twice.
bool fits(const Shape& s, const Dispatched& d) {
    std::vector<i64> count(s.slots, 0);
    for (const Input& sent : d.input)
        for (i64 id : sent.ids)
            if (id >= 0) ++count[id];
    return d.layout != Layout::batched || *std::max_element(count.begin(), count.end()) <= static_cast<i64>(s.ranks) * s.max_tokens;
}

std::unique_ptr<Combined> random_combine(Random& random, const Shape& s, const Limits& limits, const Dispatched& routed) {
    auto c = std::make_unique<Combined>();
    c->routed = &routed;
    c->type = static_cast<Type>(random.between(0, 2));
    c->bias_type = random.once_in(3) ? Type::fp32 : c->type;
    c->wire = random.once_in(3) ? c->type : Type::fp32;
    c->weighted = random.once_in(2);
    c->bias = random.once_in(3);
    c->grads = random.once_in(3);
    const i64 row = align_up(routed.hidden * size_of(c->type), 16);
    const i64 bias_row = align_up(routed.hidden * size_of(c->bias_type), 16);
    const bool shared_bias = random.once_in(2);
    for (i32 rank = 0; rank < s.ranks; ++rank) {
        Combined::Part part;
        const i32 tokens = routed.input[rank].tokens, rows = routed.receive_buffer[rank].max_rows;
        part.workers = random.once_in(4) ? random.between(1, limits.workers) : 1;
        part.y_stride = row + 16 * random.between(0, 2);
        part.y = random_rows(random, rows, part.y_stride, routed.hidden, c->type);
        part.y_in_window = random.once_in(3);
        part.bias_stride = shared_bias ? 0 : bias_row;
        if (c->bias) part.bias = random_rows(random, shared_bias ? 1 : tokens, bias_row, routed.hidden, c->bias_type);
        part.out_stride = row + 16 * random.between(0, 1);
        part.out.assign(tokens * part.out_stride, kUntouched);
        for (i32 i = 0; c->grads && i < rows * (routed.layout == Layout::flat ? s.topk : 1); ++i) part.grads.push_back(random.value());
        if (c->grads) part.out_grads.assign(tokens * s.topk, 77.0f);
        c->parts.push_back(part);
    }
    return c;
}

i64 heap_needed(const Shape& s, const Scenario& scenario) {
    i64 bytes = 0;
    for (const auto& d : scenario.dispatches) {
        i64 rows = 0;
        for (const ReceiveBuffer& receive_buffer : d->receive_buffer) rows = std::max<i64>(rows, receive_buffer.max_rows);
        const i64 flat_rows = static_cast<i64>(s.ranks) * s.max_tokens;
        bytes += rows * (d->row_bytes + 8 + s.topk * 12) + std::max(rows, flat_rows) * d->scale_bytes + flat_rows * s.topk * 4;
        bytes += 6 * (Cluster::kGuard + 32);
    }
    for (const auto& c : scenario.combines) {
        i64 most = 0;
        for (const Combined::Part& part : c->parts) most = std::max<i64>(most, part.y.size());
        bytes += most + Cluster::kGuard + 32;
    }
    return bytes;
}

// Weights that the source ranks of a combine give, in every other that may have them.  What else is drawn does not depend on it.
void draw_weights(const Shape& s, Combined& c, u64 seed) {
    Random random(seed);
    c.own_weights = takes_weights(s) && c.routed->layout != Layout::flat && c.weighted && !c.grads && random.once_in(2);
    for (i32 rank = 0; rank < s.ranks && c.own_weights; ++rank)
        for (i32 i = 0; i < c.routed->input[rank].tokens * s.topk; ++i) c.parts[rank].weights.push_back(random.value());
}

// A combine of one of the first `lanes` dispatches.
void add_combine(Random& random, const Limits& limits, Scenario& scenario, i32 lanes) {
    const Dispatched& lane = *scenario.dispatches[random.between(0, lanes - 1)];
    scenario.combines.push_back(random_combine(random, scenario.shape, limits, lane));
    draw_weights(scenario.shape, *scenario.combines.back(), scenario.combines.size() + 100 * scenario.combines.back()->parts[0].y.size());
    scenario.steps.push_back({nullptr, scenario.combines.back().get()});
}

// A dispatch whole or in two halves, with combines of what was dispatched before in between.
void add_dispatch(Random& random, const Limits& limits, Scenario& scenario, std::unique_ptr<Dispatched> d, i32 lanes) {
    Dispatched* added = d.get();
    scenario.dispatches.push_back(std::move(d));
    if (!random.once_in(3)) return scenario.steps.push_back({added, nullptr});
    added->begun.resize(scenario.shape.ranks);
    scenario.steps.push_back({added, nullptr, Part::begin});
    for (i32 combines = lanes > 0 ? random.between(0, 2) : 0; combines > 0; --combines) add_combine(random, limits, scenario, lanes);
    scenario.steps.push_back({added, nullptr, Part::end});
}

}  // namespace

OfRank experts_of(const Shape& s, i32 rank) {
    OfRank of{0, 0};
    for (i32 r = 0; r <= rank; ++r) {
        of.first += of.count;
        of.count = (s.slots - of.first + s.ranks - r - 1) / (s.ranks - r);
    }
    return of;
}

i32 owner_of(const Shape& s, i64 expert) {
    i32 rank = 0;
    while (experts_of(s, rank).first + experts_of(s, rank).count <= expert) ++rank;
    return rank;
}

i32 scale_groups(const Shape& s, const Dispatched& d, i32 rank) { return d.layout == Layout::batched ? experts_of(s, rank).count : 1; }

i64 rows_needed(const Shape& s, const Dispatched& d, i32 rank) {
    std::vector<i64> count(s.slots, 0);
    i64 slots = 0;
    for (const Input& sent : d.input) {
        for (i32 token = 0; token < sent.tokens; ++token) {
            bool here = false;
            for (i32 k = 0; k < s.topk; ++k) {
                const i64 id = sent.ids[token * s.topk + k];
                if (id < 0 || owner_of(s, id) != rank) continue;
                ++count[id];
                here = true;
            }
            slots += here;
        }
    }
    if (d.layout == Layout::flat) return slots;
    if (d.layout == Layout::batched) return experts_of(s, rank).count * *std::max_element(count.begin(), count.end());
    i64 rows = 0;
    for (i64 n : count) rows += (n + d.alignment - 1) / d.alignment * d.alignment;
    return rows;
}

Scenario random_scenario(Random& random, const Limits& limits) {
    Scenario scenario;
    Shape& s = scenario.shape = random_shape(random, limits);
    const i32 hidden = random_hidden(random, s);
    if (hidden > 1000 && random.once_in(4)) s.max_tokens = random.between(60, 120);  // a round that is large to the executor
    const i32 lanes = random.between(1, 2), rounds = random.between(lanes, 6);
    for (i32 lane = 0; lane < lanes; ++lane) {
        auto d = random_dispatch(random, s, limits, hidden);
        while (!fits(s, *d)) d = random_dispatch(random, s, limits, hidden);
        add_dispatch(random, limits, scenario, std::move(d), lane);
    }
    while (static_cast<i32>(scenario.steps.size()) < rounds) {
        if (random.once_in(4)) {
            add_dispatch(random, limits, scenario, random_repeat(random, *scenario.dispatches[random.between(0, lanes - 1)]), lanes);
        } else {
            add_combine(random, limits, scenario, lanes);
        }
    }
    s.staged_row_bytes = align_up(hidden * 4, 16) + align_up(s.topk * 4, 16);
    for (const auto& d : scenario.dispatches)
        s.receive_bytes = std::max(s.receive_bytes, received_token_bytes(s, d->row_bytes, d->scale_bytes));
    // Room for what goes straight: of none, of some ranks, of all.
    if (domains(s) > 1) s.packet_bytes = random.one_of({0, 1, 2, 2}) * ((s.max_tokens + 1) / 2 * direct_bytes(s));
    s.heap_and_experts = heap_and_experts(heap_needed(s, scenario), 0);
    return scenario;
}

}  // namespace moecomm::test
