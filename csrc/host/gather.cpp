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

Tokens forwarded_tokens(const Combine& c, i32 source_rank) {
    const i64 pitch = forwarded_words(c.shape);
    const i32* kept = memory<const i32>(c.a.route.forwarded) + source_rank * c.shape.max_tokens * pitch;
    const i32 count = c.direct_to(source_rank) ? 0 : c.sent[source_rank].num_tokens;
    return {source_rank, count, c.sent[source_rank].chunk_tokens, kept + 2 * c.topk, kept, kept + c.topk, pitch, pitch};
}

Gather::Contribution Gather::contribution(i32 rank, i32 slot, i32 token) const {
    const RoundHeader& from = c_.r.header(rank);
    const auto published = [&](i64 row) {
        return at<const u8>(c_.a.ctx, rank, from.combine.rows) + row * static_cast<i64>(from.combine.pitch);
    };
    const bool in_place = from.combine.rows != 0;
    u8* const staged = c_.staged(rank, tokens_.source_rank, token);
    if (c_.flat) return {in_place ? published(slot) : staged, c_.staged_type, 1.0f};
    if (c_.single_rows_travel) {
        const i32 *owners = tokens_.owners_of(token), *end = owners + c_.topk, *first = std::find(owners, end, rank);
        const i32 k = static_cast<i32>(first - owners);
        if (std::find(first + 1, end, rank) == end) {
            if (!in_place) return {staged, c_.type, c_.own_weights ? c_.own_weight(c_.r.me, token, k) : c_.staged_weight(staged)};
            const i64 row = tokens_.rows_of(token)[k];
            return {published(row), c_.type, c_.weight_in_place(rank, row, tokens_.source_rank, token, k)};
        }
    }
    return {in_place ? nullptr : staged, c_.staged_type, 1.0f};
}

void Gather::append_in_place(Addends& rows, i32 token, i32 k) const {
    const i32 owner = tokens_.owners_of(token)[k];
    const i64 row = tokens_.rows_of(token)[k];
    const RoundHeader& from = c_.r.header(owner);
    const u8* published = at<const u8>(c_.a.ctx, owner, from.combine.rows) + row * static_cast<i64>(from.combine.pitch);
    rows.add(published, c_.type, c_.weight_in_place(owner, row, tokens_.source_rank, token, k));
}

// Reduce the token's rows at `rank` in place and round as that rank would have staged them, so that both ways give the same bits.
void Gather::add_in_place(float* sum, i32 token, i32 rank, i64 column, i64 n) const {
    Addends rows;
    for (i32 k = 0; k < c_.topk; ++k)
        if (tokens_.owners_of(token)[k] == rank) append_in_place(rows, token, k);
    Sums partial;
    sum_rows(partial.of, rows, column, n);
    if (c_.staged_type == Type::fp32) return add_row(sum, reinterpret_cast<const u8*>(partial.of), Type::fp32, 1.0f, n);
    u8 rounded[kColumns * sizeof(u16)];
    round_row(rounded, partial.of, c_.staged_type, n);
    add_row(sum, rounded, c_.staged_type, 1.0f, n);
}

// Hash the rows that `rank` contributes to a token, as that rank has.
u64 Gather::check_hash(i32 rank, i32 slot, i32 token) const {
    const CorruptRow name{rank, tokens_.source_rank, token};
    const RoundHeader& from = c_.r.header(rank);
    const i64 bytes = c_.a.hidden * bytes_of(c_.type);
    if (from.combine.rows == 0) {
        const Contribution part = contribution(rank, slot, token);
        const bool single = c_.single_rows_travel && part.type == c_.type;
        c_.checks->flip_now(name, part.row, c_.staged_bytes(single));
        return c_.hash_of(part.row, c_.staged_bytes(single));
    }
    u64 hash = 0;
    for (i32 k = 0; k < (c_.flat ? 1 : c_.topk); ++k) {
        if (!c_.flat && tokens_.owners_of(token)[k] != rank) continue;
        const i64 row = c_.flat ? slot : tokens_.rows_of(token)[k];
        const u8* published = at<const u8>(c_.a.ctx, rank, from.combine.rows) + row * static_cast<i64>(from.combine.pitch);
        c_.checks->flip_now(name, published, bytes);
        hash = hash_row(published, bytes, hash);
    }
    return hash;
}

void Gather::check(i32 token) const {
    for (i32 p = 0; p < c_.r.scaleup_ranks && c_.checks != nullptr; ++p) {
        const i32 slot = tokens_.slots_of(token)[p], rank = c_.r.first + p;
        if (slot < 0) continue;
        const u64 hash = check_hash(rank, slot, token);
        c_.checks->compare(c_.r.tag, c_.checks->rows_of(tokens_.source_rank), {rank, tokens_.source_rank, token}, hash);
    }
}

void Gather::add_up(float* sum, i32 token, i64 column, i64 n, const u8* bias) const {
    const i32* slot = tokens_.slots_of(token);
    const Type bias_type = static_cast<Type>(c_.a.bias_type);
    Addends rows;
    bool one_by_one = false;
    if (bias != nullptr) rows.add(bias, bias_type, 1.0f);
    if (c_.unsummed) {
        for (i32 k = 0; k < c_.topk; ++k)
            if (tokens_.owners_of(token)[k] >= 0) append_in_place(rows, token, k);
        return sum_rows(sum, rows, column, n);
    }
    for (i32 p = 0; p < c_.r.scaleup_ranks && !one_by_one; ++p) {
        if (slot[p] < 0) continue;
        const Contribution part = contribution(c_.r.first + p, slot[p], token);
        one_by_one = part.row == nullptr || has_scales(part.type);
        rows.add(part.row, part.type, part.factor);
    }
    if (!one_by_one) return sum_rows(sum, rows, column, n);
    std::fill_n(sum, n, 0.0f);
    if (bias != nullptr) add_row(sum, bias + column * bytes_of(bias_type), bias_type, 1.0f, n);
    for (i32 p = 0; p < c_.r.scaleup_ranks; ++p) {
        if (slot[p] < 0) continue;
        const Contribution part = contribution(c_.r.first + p, slot[p], token);
        if (part.row == nullptr) {
            add_in_place(sum, token, c_.r.first + p, column, n);
        } else {
            add_staged(sum, part.row, part.type, part.factor, c_.a.hidden, column, n);
        }
    }
}

}  // namespace moecomm::host
