#include "gather.h"

#include <algorithm>

namespace moecomm::host {

Tokens own_tokens(const Combine& c) {
    return {c.r.me,
            c.a.num_tokens,
            c.a.chunk_tokens,
            memory<const i32>(c.a.route.token_slot) + c.r.first,
            memory<const i32>(c.a.route.token_rows),
            memory<const i32>(c.a.route.token_owner),
            c.r.ranks,
            c.topk};
}

Tokens forwarded_tokens(const Combine& c, i32 domain) {
    const i64 pitch = forwarded_words(c.shape);
    const i32* kept = memory<const i32>(c.a.route.forwarded) + domain * c.shape.max_tokens * pitch;
    const i32 source_rank = c.r.counterpart(domain);
    const i32 count = c.direct_to(source_rank) ? 0 : c.sent[source_rank].num_tokens;
    return {source_rank, count, c.sent[source_rank].chunk_tokens, kept + 2 * c.topk, kept, kept + c.topk, pitch, pitch};
}

// The only row of the token at `rank`: a staged row or, in place, the row of `y`.  Null if `rank` has several rows, in place.
const u8* Gather::single_row(i32 rank, i32 slot, i32 token) const {
    const RoundHeader& from = c_.r.header(rank);
    if (from.combine.rows == 0) return c_.staged(rank, tokens_.source_rank, token);
    return c_.flat ? at<const u8>(c_.a.ctx, rank, from.combine.rows) + slot * static_cast<i64>(from.combine.pitch) : nullptr;
}

// Reduce the token's rows at `rank` in place and round as that rank would have staged them, so that both ways give the same bits.
void Gather::add_in_place(float* sum, i32 token, i32 rank, i64 column, i64 n) const {
    const CombineArgs& a = c_.a;
    const RoundHeader& from = c_.r.header(rank);
    Addends rows;
    rows.type = c_.type;
    for (i32 k = 0; k < c_.topk; ++k) {
        if (tokens_.owners_of(token)[k] != rank) continue;
        const i64 row = tokens_.rows_of(token)[k];
        float weight = from.combine.weights != 0 ? at<const float>(a.ctx, rank, from.combine.weights)[row] : 1.0f;
        if (c_.own_weights) weight = c_.own_weight(tokens_.source_rank, token, k);
        rows.add(at<const u8>(a.ctx, rank, from.combine.rows) + row * static_cast<i64>(from.combine.pitch), weight);
    }
    Sums partial;
    sum_rows(partial.of, rows, column, n);
    if (c_.staged_type == Type::fp32) return add_row(sum, reinterpret_cast<const u8*>(partial.of), Type::fp32, n);
    u8 rounded[kColumns * sizeof(u16)];
    round_row(rounded, partial.of, c_.staged_type, n);
    add_row(sum, rounded, c_.staged_type, n);
}

void Gather::add_up(float* sum, i32 token, i64 column, i64 n) const {
    const i32* slot = tokens_.slots_of(token);
    Addends rows;
    rows.type = c_.staged_type;
    bool several = false;
    for (i32 p = 0; p < c_.r.scaleup_ranks && !several; ++p) {
        if (slot[p] < 0) continue;
        const u8* row = single_row(c_.r.first + p, slot[p], token);
        several = row == nullptr;
        rows.add(row, 1.0f);
    }
    if (!several) return sum_rows(sum, rows, column, n);
    std::fill_n(sum, n, 0.0f);
    for (i32 p = 0; p < c_.r.scaleup_ranks; ++p) {
        if (slot[p] < 0) continue;
        const u8* row = single_row(c_.r.first + p, slot[p], token);
        if (row == nullptr) {
            add_in_place(sum, token, c_.r.first + p, column, n);
        } else {
            add_row(sum, row + column * bytes_of(c_.staged_type), c_.staged_type, n);
        }
    }
}

}  // namespace moecomm::host
