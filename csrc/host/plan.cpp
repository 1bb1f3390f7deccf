#include "plan.h"

#include <algorithm>
#include <cstring>

#include "rank_set.h"

namespace moecomm::host {

BadEntry worse(const BadEntry& a, const BadEntry& b) {
    if (a.argument == Argument::none) return b;
    if (b.argument == Argument::none) return a;
    if (a.argument != b.argument) return a.argument == Argument::topk_idx ? a : b;
    return a.entry <= b.entry ? a : b;
}

Plan::Plan(const DispatchArgs& args, const Round& round)
    : a_(args), r_(round), shape_(args.ctx.shape), columns_(args.ctx.window.columns), ranges_(expert_ranges(args.ctx.shape)) {
    if (a_.repeat != 0 || a_.part == static_cast<i32>(Part::end)) return;
    ids_.reset(new i32[static_cast<i64>(a_.num_tokens) * shape_.topk]);  // not initialized: count() writes all of them
    before_.assign(static_cast<i64>(own_chunks()) * columns_, 0);
    total_.assign(columns_, 0);
    earlier_.assign(columns_, 0);
}

i64 Plan::expert_of(i64 given, i64 entry) const {
    if (is_balanced(a_.ctx.placed)) return at<const i32>(a_.ctx, r_.me, chosen_at(a_.ctx.window))[entry];
    return a_.ctx.placed == kByTable ? slot_of(r_.placement, given, entry, shape_.topk, shape_.slots, a_.route.first_token) : given;
}

BadEntry Plan::count(i32 chunk) {
    i32* counts = before_chunk(chunk);
    const i32 first = chunk * a_.chunk_tokens;
    const i32 end = std::min(first + a_.chunk_tokens, a_.num_tokens);
    BadEntry bad = bad_weight(first, end);
    for (i32 token = first; token < end; ++token) {
        RankSet seen;
        for (i64 entry = static_cast<i64>(token) * shape_.topk; entry < (token + 1ll) * shape_.topk; ++entry) {
            const i64 given = read_id(entry);
            const i64 slot = expert_of(given, entry);
            const bool valid = valid_id(slot, shape_.slots);
            const i32 id = ids_[entry] = valid ? static_cast<i32>(slot) : -1;
            if (!valid) {
                bad = worse(bad, {Argument::topk_idx, entry, given});
            } else if (id >= 0) {
                ++counts[id];
                seen.add(owner(id));
            }
        }
        for (i32 rank = seen.first(); rank >= 0; rank = seen.first()) {
            ++counts[shape_.slots + rank];
            seen.remove(rank);
        }
    }
    return bad;
}

BadEntry Plan::bad_weight(i32 token, i32 end) const {
    if (a_.check_weights == 0 || a_.topk_weights == 0) return {};
    const float* weights = memory<const float>(a_.topk_weights);
    for (i64 entry = static_cast<i64>(token) * shape_.topk; entry < static_cast<i64>(end) * shape_.topk; ++entry)
        if (weights[entry] != weights[entry]) return {Argument::topk_weights, entry, 0};
    return {};
}

const i32* Plan::total_up(bool bad) {
    if (bad) return total_.data();
    for (i32 chunk = 0; chunk < own_chunks(); ++chunk) {
        i32* counts = before_chunk(chunk);
        for (i32 c = 0; c < columns_; ++c) {
            const i32 here = counts[c];
            counts[c] = total_[c];
            total_[c] += here;
        }
    }
    return total_.data();
}

void Plan::gather() {
    std::fill(total_.begin(), total_.end(), 0);
    for (i32 source = 0; source < r_.ranks; ++source) {
        if (source == r_.me) earlier_ = total_;
        r_.add_counts(source, total_.data());
    }
}

i64 Plan::rows_needed(i32 rank) const {
    const i32* counts = &total_[ranges_.first(rank)];
    if (a_.layout == static_cast<i32>(Layout::flat)) return total_[shape_.slots + rank];
    i64 rows = 0;
    for (i32 e = 0; e < ranges_.count(rank); ++e) rows += align_up<i64>(counts[e], a_.alignment);
    return rows;
}

ValidationResult Plan::validate_capacity() const {
    for (i32 p = 0; p < r_.ranks; ++p) {
        if (a_.layout == static_cast<i32>(Layout::batched)) {
            const i64 group = batched_group(r_.header(p).max_rows, ranges_.count(p));
            for (i32 e = ranges_.first(p); e < ranges_.first(p + 1); ++e)
                if (total_[e] > group) return {Failure::bad_input, batched_error(shape_, group), p, group, total_[e]};
        } else if (rows_needed(p) > r_.header(p).max_rows) {
            return {Failure::bad_input, Argument::max_rows, p, r_.header(p).max_rows, rows_needed(p)};
        }
    }
    return {Failure::none, Argument::none, -1, 0, 0};
}

void Plan::place() {
    store_outputs();
    if (a_.layout != static_cast<i32>(Layout::flat)) place_experts();
}

// Within a group, rows of lower source ranks come first; groups of one owner follow each other.
void Plan::place_experts() {
    i32 start = 0;
    for (i32 e = 0; e < shape_.slots; ++e) {
        const i32 rank = owner(e), local_expert = local(e);
        if (a_.layout == static_cast<i32>(Layout::batched)) {
            start = local_expert * batched_group(r_.header(rank).max_rows, ranges_.count(rank));
        } else if (local_expert == 0) {
            start = 0;
        }
        earlier_[e] += start;
        if (a_.layout == static_cast<i32>(Layout::expert)) start += aligned_group(total_[e], a_.alignment);
    }
}

void Plan::store_outputs() {
    SourceTokens* sent = memory<SourceTokens>(a_.route.sent);
    for (i32 source = 0; source < r_.ranks; ++source) sent[source] = {r_.header(source).num_tokens, r_.header(source).chunk_tokens};
    const i32 here = experts_here();
    const i32* counts = &total_[ranges_.first(r_.me)];
    std::copy_n(counts, here, memory<i32>(a_.tokens_per_expert));
    const i32 alignment = a_.layout == static_cast<i32>(Layout::expert) ? a_.alignment : 1;
    std::transform(counts, counts + here, memory<i64>(a_.rows_per_expert), [=](i32 count) { return aligned_group(count, alignment); });
    i64 rows = 0;
    for (i32 e = 0; e < here; ++e) rows += counts[e];
    *memory<i32>(a_.num_rows) = static_cast<i32>(a_.layout == static_cast<i32>(Layout::batched) ? rows : rows_needed(r_.me));
}

void Plan::clear() {
    const i64 tokens = a_.num_tokens;
    std::fill_n(memory<i32>(a_.route.token_rows), tokens * shape_.topk, -1);
    std::fill_n(memory<i32>(a_.route.token_owner), tokens * shape_.topk, -1);
    std::fill_n(memory<i32>(a_.route.token_slot), tokens * r_.ranks, -1);
    std::fill_n(memory<SourceTokens>(a_.route.sent), r_.ranks, SourceTokens{0, 1});
    std::fill_n(traffic_of(a_.route, r_.ranks), 2 * r_.ranks, 0);
    std::fill_n(memory<i32>(a_.tokens_per_expert), experts_here(), 0);
    std::fill_n(memory<i64>(a_.rows_per_expert), experts_here(), 0);
    *memory<i32>(a_.num_rows) = 0;
}

i32* Plan::cursors(i32 chunk) {
    i32* rows = before_chunk(chunk);
    for (i32 c = 0; c < columns_; ++c) rows[c] += earlier_[c];
    return rows;
}

Plan::Padding Plan::padding(i32 expert, i64 group_start) const {
    const i32 count = total_[ranges_.first(r_.me) + expert];
    return {group_start + count, group_start + aligned_group(count, a_.alignment)};
}

}  // namespace moecomm::host
