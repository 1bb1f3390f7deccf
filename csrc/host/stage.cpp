#include "stage.h"

#include <algorithm>
#include <vector>

namespace moecomm::host {

namespace {

u32 range_of(const Combine& c, i32 source_rank, i32 chunk) {
    return memory<const u32>(c.a.route.ranges)[static_cast<i64>(source_rank) * c.shape.max_tokens + chunk];
}

const i32* rows_of(const Combine& c, i32 slot) { return memory<const i32>(c.a.route.rows) + static_cast<i64>(slot) * c.topk; }

// The number, at its source rank, of the token in flat row `slot`.
i32 token_of(const Combine& c, i32 slot) {
    i64 row = slot;
    if (!c.flat) {
        const i32* rows = rows_of(c, slot);
        while (*rows < 0) ++rows;
        row = *rows;
    }
    return memory<const i32>(c.a.route.src)[2 * row + 1];
}

// The weight of the row of a token's k-th expert.
float factor_of(const Combine& c, i32 source_rank, i32 token, i32 k, i32 row) {
    if (c.a.weighted == 0) return 1.0f;
    return c.own_weights ? c.own_weight(source_rank, token, k) : memory<const float>(c.a.route.row_weights)[row];
}

// The k of the token's only row here, if that travels as it is; else -1.
i32 single_row(const Combine& c, const i32* rows) {
    i32 single = -1;
    for (i32 k = 0; k < c.topk && c.single_rows_travel; ++k) {
        if (rows[k] < 0) continue;
        if (single >= 0) return -1;
        single = k;
    }
    return single;
}

// Reduce this rank's rows of the token in flat row `slot`, in the order of k.
void reduce_row(const Combine& c, i32 source_rank, i32 slot, u8* staged, float* scratch) {
    const i32* rows = rows_of(c, slot);
    const i32 token = token_of(c, slot);
    Addends from;
    if (const i32 k = single_row(c, rows); k >= 0) {
        copy_row(staged, memory<const u8>(c.a.y) + rows[k] * c.a.y_stride, c.a.hidden * bytes_of(c.type), c.past_cache);
        if (!c.own_weights) c.staged_weight(staged) = factor_of(c, source_rank, token, k, rows[k]);
        return;
    }
    for (i32 k = 0; k < c.topk; ++k)
        if (rows[k] >= 0) from.add(memory<const u8>(c.a.y) + rows[k] * c.a.y_stride, c.type, factor_of(c, source_rank, token, k, rows[k]));
    if (c.staged_type == Type::fp32) return sum_rows(reinterpret_cast<float*>(staged), from, 0, c.a.hidden);
    for (i64 column = 0; column < c.a.hidden; column += kColumns) {
        const i64 n = std::min<i64>(kColumns, c.a.hidden - column);
        sum_rows(scratch, from, column, n);
        stage_columns(staged, scratch, c.staged_type, c.a.hidden, column, n);
    }
}

// The gradients of the token's weights travel at the end of its row.
void stage_grads(const Combine& c, i32 slot, u8* staged) {
    const float* grads = memory<const float>(c.a.weight_grads);
    const i32* rows = rows_of(c, slot);
    float* out = reinterpret_cast<float*>(staged + c.grads_at);
    for (i32 k = 0; k < c.topk; ++k) {
        if (c.flat) {
            out[k] = grads[static_cast<i64>(slot) * c.topk + k];
        } else {
            out[k] = rows[k] >= 0 ? grads[rows[k]] : 0.0f;
        }
    }
}

// Write the complete staged row of flat row `slot`: the (reduced) row, and the weight gradients.
void stage_row(const Combine& c, i32 source_rank, i32 slot, u8* staged, float* scratch) {
    if (c.flat && c.casts) {
        stage_scaled(staged, c.staged_type, memory<const u8>(c.a.y) + slot * c.a.y_stride, c.type, c.a.hidden, 0, c.a.hidden);
    } else if (c.flat) {
        copy_row(staged, memory<const u8>(c.a.y) + slot * c.a.y_stride, c.a.hidden * bytes_of(c.type), c.past_cache);
    } else {
        reduce_row(c, source_rank, slot, staged, scratch);
    }
    if (c.a.weight_grads != 0) stage_grads(c, slot, staged);
}

void check_staged(const Combine& c, i32 source_rank, i32 slot, const u8* staged) {
    if (c.checks == nullptr) return;
    const bool single = !c.flat && single_row(c, rows_of(c, slot)) >= 0;
    c.checks->sent(c.r.tag, c.checks->rows_of(source_rank), token_of(c, slot), c.hash_of(staged, c.staged_bytes(single)));
}

// Hash the rows of y that peers read in place for a token.
u64 hash_in_place(const Combine& c, i32 slot) {
    const auto row = [&](i64 number) { return memory<const u8>(c.a.y) + number * c.a.y_stride; };
    const i64 bytes = c.a.hidden * bytes_of(c.type);
    if (c.flat) return hash_row(row(slot), bytes);
    u64 hash = 0;
    for (i32 k = 0; k < c.topk; ++k)
        if (const i32 number = rows_of(c, slot)[k]; number >= 0) hash = hash_row(row(number), bytes, hash);
    return hash;
}

}  // namespace

void check_in_place(const Combine& c) {
    for (i32 source_rank = 0; source_rank < c.r.ranks && c.checks != nullptr && c.in_place; ++source_rank) {
        for (i32 chunk = 0; chunk < c.chunks_of(source_rank) && !c.direct_to(source_rank); ++chunk) {
            const u32 range = range_of(c, source_rank, chunk);
            for (i32 slot = signal_first(range); slot < signal_first(range) + signal_count(range); ++slot)
                c.checks->sent(c.r.tag, c.checks->rows_of(source_rank), token_of(c, slot), hash_in_place(c, slot));
        }
    }
}

bool rows_here(const Combine& c, i32 source_rank, i32 chunk) { return signal_count(range_of(c, source_rank, chunk)) > 0; }

const u64* missing_weight(const Combine& c, i32 source_rank, i32 chunk) {
    const u32 range = range_of(c, source_rank, chunk);
    if (!c.own_weights || signal_count(range) == 0) return nullptr;
    if (!c.r.tagged_words_arrived(source_rank)) return c.r.signal(tagged_words_signal(source_rank));
    for (i32 slot = signal_first(range); slot < signal_first(range) + signal_count(range); ++slot) {
        if (single_row(c, rows_of(c, slot)) >= 0) continue;  // the source rank has its weight
        for (i32 k = 0; k < c.topk; ++k) {
            const u64* word = c.weight(c.r.me, source_rank, token_of(c, slot), k);
            if (rows_of(c, slot)[k] >= 0 && signal_tag(load_relaxed(word)) != c.r.tag) return word;
        }
    }
    return nullptr;
}

void stage_chunk(const Combine& c, i32 source_rank, i32 chunk, float* scratch) {
    const u32 range = range_of(c, source_rank, chunk);
    for (i32 slot = signal_first(range); slot < signal_first(range) + signal_count(range); ++slot) {
        u8* staged = c.staged(c.r.me, source_rank, token_of(c, slot));
        stage_row(c, source_rank, slot, staged, scratch);
        check_staged(c, source_rank, slot, staged);
    }
    order_copied_rows();
    const i32 puller = c.r.local(source_rank);
    store_release(at<u64>(c.a.ctx, puller, reduced_for(c.a.ctx.window, c.shape, source_rank, c.r.me, chunk)), tag_signal(c.r.tag));
}

void put_chunk(const Combine& c, DirectSends& sent, i32 source_rank, i32 chunk, float* scratch) {
    const u32 range = range_of(c, source_rank, chunk);
    std::vector<u8> row(c.shape.staged_row_bytes);
    const u64 bytes = c.a.weight_grads != 0 ? row.size() : static_cast<u64>(c.staged_bytes(false));
    for (i32 slot = signal_first(range); slot < signal_first(range) + signal_count(range); ++slot) {
        stage_row(c, source_rank, slot, row.data(), scratch);
        check_staged(c, source_rank, slot, row.data());
        c.r.link().put(source_rank, direct_row_at(c.a.ctx.window, c.shape, c.r.tag, c.r.me, token_of(c, slot)), row.data(), bytes);
    }
    sent.end_part(c.r, source_rank, signal_count(range) > 0);
}

}  // namespace moecomm::host
