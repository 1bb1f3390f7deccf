#include "scaleout_return_forward.h"

namespace moecomm::host {

// True if this domain has a row of the token.
bool ReturnForward::ours(i32 token) const {
    const i32* slots = tokens_.slots_of(token);
    return std::any_of(slots, slots + c_.r.scaleup_ranks, [](i32 slot) { return slot >= 0; });
}

bool ReturnForward::any_ours(i32 chunk) const {
    for (i32 token = first_token(chunk); token < end_token(chunk); ++token)
        if (ours(token)) return true;
    return false;
}

// True if the chunk's places at the source rank are free, that is, if the source rank has read the chunk stored there before.
bool ReturnForward::scaleout_ready(i32 chunk) const {
    if (chunk < ring_ || !any_ours(chunk)) return true;
    return load_acquire(credit(chunk)) == word_signal(c_.r.tag, static_cast<u32>(chunk - ring_));
}

void ReturnForward::pull_token(i32 token) {
    const CombineArgs& a = c_.a;
    if (!ours(token)) return;
    gather_.check(token);
    for (i64 column = 0; column < a.hidden; column += kColumns) {
        const i64 n = std::min<i64>(kColumns, a.hidden - column);
        gather_.add_up(scratch_, token, column, n);
        stage_columns(row_.data(), scratch_, c_.scaleout_type, a.hidden, column, n);
    }
    float* grads = reinterpret_cast<float*>(row_.data() + c_.grads_at);
    for (i32 k = 0; k < c_.topk && a.weight_grads != 0; ++k) {
        const i32 owner = tokens_.owners_of(token)[k];
        if (a.sum_grads != 0) {
            grads[k] = 0.0f;
            for (i32 p = 0; p < c_.r.scaleup_ranks; ++p)
                if (tokens_.slots_of(token)[p] >= 0) grads[k] += gather_.grad(token, k, c_.r.first + p);
            continue;
        }
        grads[k] = owner >= 0 && c_.r.reaches(owner) ? gather_.grad(token, k, owner) : 0.0f;
    }
    const i64 sum_bytes = staged_bytes(c_.scaleout_type, a.hidden);
    const u64 bytes = a.weight_grads != 0 ? row_.size() : static_cast<u64>(sum_bytes);
    if (c_.checks != nullptr) c_.checks->sent(c_.r.tag, c_.checks->sums_of(tokens_.source_rank), token, c_.hash_of(row_.data(), sum_bytes));
    c_.r.link().put(tokens_.source_rank, returned_at(a.ctx.window, c_.shape, c_.r.domain(), token), row_.data(), bytes);
}

void ReturnForward::pass_on(i32 chunk) {
    if (!any_ours(chunk)) return;
    const u64 returned = returned_signal(c_.shape, c_.r.domain(), chunk, tokens_.chunk_tokens);
    c_.r.link().signal(tokens_.source_rank, returned, word_signal(c_.r.tag, static_cast<u32>(chunk)));
}

}  // namespace moecomm::host
