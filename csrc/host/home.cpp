#include "home.h"

namespace moecomm::host {

Home::Home(Combine& c, i32 worker, i32 stride, float* scratch)
    : c_(c), scratch_(scratch), all_(ceil_div(c.a.num_tokens, c.a.chunk_tokens)), ring_(ring_chunks(c.shape, c.a.chunk_tokens)) {
    for (i32 chunk = worker; chunk < all_; chunk += stride) chunks_.push_back({chunk, owners(chunk), false});
}

u64 Home::owners(i32 chunk) const {
    const i32 first = chunk * c_.a.chunk_tokens, end = std::min(first + c_.a.chunk_tokens, c_.a.num_tokens);
    const i32* slot = memory<const i32>(c_.a.route.token_slot) + static_cast<i64>(first) * c_.r.ranks;
    u64 ranks = 0;
    for (i32 token = first; token < end; ++token)
        for (i32 p = 0; p < c_.r.ranks; ++p, ++slot) ranks |= static_cast<u64>(*slot >= 0) << p;
    return ranks;
}

// The chunks of one place in the ring are pulled in order, also those that nobody stages and that could be pulled at any time: else an
// older credit would come after a later one, and who waits for that would wait forever.
bool Home::has_turn(i32 chunk) const {
    if (chunk < ring_) return true;
    return load_acquire(at<const u64>(c_.a.ctx, c_.r.me, credit_of(chunk))) == word_signal(c_.r.tag, static_cast<u32>(chunk - ring_));
}

bool Home::ready(Chunk& chunk) {
    for (; chunk.awaited != 0; chunk.awaited &= chunk.awaited - 1) {
        const i32 p = __builtin_ctzll(chunk.awaited);
        if (c_.r.notice(p).x == 0 && !has_tag(flag(p, chunk.number), c_.r.tag)) return false;
    }
    return has_turn(chunk.number);
}

bool Home::any_ready() {
    for (size_t i = first_; i < horizon(); ++i)
        if (!chunks_[i].pulled && ready(chunks_[i])) return true;
    return false;
}

Missing Home::missing() const {
    const Chunk& chunk = chunks_[first_];
    if (chunk.awaited == 0) return {c_.r.me, at<const u64>(c_.a.ctx, c_.r.me, credit_of(chunk.number)), c_.r.tag};
    const i32 p = __builtin_ctzll(chunk.awaited);
    return {p, flag(p, chunk.number), c_.r.tag};
}

void Home::pull_in_order() {
    for (; first_ < chunks_.size() && (chunks_[first_].pulled || ready(chunks_[first_])); ++first_)
        if (!chunks_[first_].pulled) pull(chunks_[first_]);
}

bool Home::pull_ready() {
    bool any = false;
    for (size_t i = first_; i < horizon(); ++i) {
        if (chunks_[i].pulled || !ready(chunks_[i])) continue;
        pull(chunks_[i]);
        any = true;
    }
    while (first_ < chunks_.size() && chunks_[first_].pulled) ++first_;
    return any;
}

void Home::pull_all() {
    while (first_ < chunks_.size()) {
        if (pull_ready()) continue;
        if (!c_.r.watch.until(Phase::reduced, [&] { return any_ready(); }, [&] { return missing(); })) return;
    }
}

void Home::pull(Chunk& chunk) {
    const i32 first = chunk.number * c_.a.chunk_tokens, end = std::min(first + c_.a.chunk_tokens, c_.a.num_tokens);
    for (i32 token = first; token < end; ++token) pull_token(token);
    chunk.pulled = true;
    if (chunk.number + ring_ < all_) grant_credit(chunk.number);
}

// To everybody, ourselves last: the chunk that comes next in the place of this one may be staged.
void Home::grant_credit(i32 chunk) const {
    for (i32 turn = 0; turn < c_.r.ranks; ++turn)
        store_release(at<u64>(c_.a.ctx, c_.r.peer(turn), credit_of(chunk)), word_signal(c_.r.tag, static_cast<u32>(chunk)));
}

// What `rank` holds of the token, where it has one row for it: a reduced one or, in place, the caller's own.  Null: several, in place.
const u8* Home::single_row(i32 rank, i32 slot, i32 token) const {
    const Notice& from = c_.r.notice(rank);
    if (from.x == 0) return c_.staged(rank, c_.r.me, token);
    return c_.flat ? at<const u8>(c_.a.ctx, rank, from.x) + slot * static_cast<i64>(from.pitch) : nullptr;
}

// The rows of the token at `rank`, in place, added up and rounded as that rank would have staged them.
void Home::add_in_place(float* sum, i32 token, i32 rank, i64 column, i64 n) const {
    const CombineArgs& a = c_.a;
    const Notice& from = c_.r.notice(rank);
    const i64 first = static_cast<i64>(token) * c_.topk;
    Addends rows;
    rows.type = c_.type;
    for (i64 entry = first; entry < first + c_.topk; ++entry) {
        if (memory<const i32>(a.route.token_owner)[entry] != rank) continue;
        const i64 row = memory<const i32>(a.route.token_rows)[entry];
        const float weight = from.weights != 0 ? at<const float>(a.ctx, rank, from.weights)[row] : 1.0f;
        rows.add(at<const u8>(a.ctx, rank, from.x) + row * static_cast<i64>(from.pitch), weight);
    }
    Sums partial;
    sum_rows(partial.of, rows, column, n);
    if (c_.staged_type == Type::fp32) return add_row(sum, reinterpret_cast<const u8*>(partial.of), Type::fp32, n);
    u8 rounded[kColumns * sizeof(u16)];
    round_row(rounded, partial.of, c_.staged_type, n);
    add_row(sum, rounded, c_.staged_type, n);
}

// The sum over the ranks, in the order of the ranks.
void Home::add_up(float* sum, i32 token, const i32* slot, i64 column, i64 n) const {
    Addends rows;
    rows.type = c_.staged_type;
    bool several = false;
    for (i32 p = 0; p < c_.r.ranks && !several; ++p) {
        if (slot[p] < 0) continue;
        const u8* row = single_row(p, slot[p], token);
        several = row == nullptr;
        rows.add(row, 1.0f);
    }
    if (!several) return sum_rows(sum, rows, column, n);
    std::fill_n(sum, n, 0.0f);
    for (i32 p = 0; p < c_.r.ranks; ++p) {
        if (slot[p] < 0) continue;
        const u8* row = single_row(p, slot[p], token);
        if (row == nullptr) {
            add_in_place(sum, token, p, column, n);
        } else {
            add_row(sum, row + column * bytes_of(c_.staged_type), c_.staged_type, n);
        }
    }
}

void Home::bring_grads(i32 token) const {
    const CombineArgs& a = c_.a;
    for (i64 entry = static_cast<i64>(token) * c_.topk, k = 0; k < c_.topk; ++entry, ++k) {
        const i32 owner = memory<const i32>(a.route.token_owner)[entry];
        float* grad = memory<float>(a.out_weight_grads) + entry;
        *grad = owner < 0 ? 0.0f : reinterpret_cast<const float*>(c_.staged(owner, c_.r.me, token) + c_.grads_at)[k];
    }
}

// The sum, then the bias, then one rounding.
void Home::pull_token(i32 token) const {
    const CombineArgs& a = c_.a;
    const i32* slot = memory<const i32>(a.route.token_slot) + static_cast<i64>(token) * c_.r.ranks;
    const u8* bias = a.bias != 0 ? memory<const u8>(a.bias) + token * a.bias_stride : nullptr;
    u8* out = memory<u8>(a.out) + token * a.out_stride;
    for (i64 column = 0; column < a.hidden; column += kColumns) {
        const i64 n = std::min<i64>(kColumns, a.hidden - column);
        add_up(scratch_, token, slot, column, n);
        if (bias != nullptr) add_row(scratch_, bias + column * bytes_of(c_.type), c_.type, n);
        round_row(out + column * bytes_of(c_.type), scratch_, c_.type, n);
    }
    if (a.out_weight_grads != 0) bring_grads(token);
}

}  // namespace moecomm::host
