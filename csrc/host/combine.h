// State of one combine of this rank, shared by the threads of its team.
#pragma once
#include <cstring>

#include "round.h"
#include "row_checks.h"
#include "rows.h"
#include "scaleout_direct.h"

namespace moecomm::host {

constexpr i32 kColumns = 1024;  // summed and rounded per pass: 4 KB of float32 sums stay in the L1 cache

// Float32 sums on the stack.  Aligned, because vector accesses that straddle cache lines take a fifth longer.
struct alignas(64) Sums {
    float of[kColumns];
};

struct Combine {
    explicit Combine(const CombineArgs& args, RowChecks* checks = nullptr) : a(args), checks(checks), r(args.ctx, Op::combine) {}

    const CombineArgs& a;
    RowChecks* const checks;  // null: rows are not checked
    Round r;
    const Shape& shape = a.ctx.shape;
    const i32 topk = shape.topk;
    const bool flat = a.layout == static_cast<i32>(Layout::flat);
    const Type type = static_cast<Type>(a.type);
    const Type scaleout_type = static_cast<Type>(a.wire);  // dtype of a domain's sum on its way to another domain
    const bool casts = has_scales(scaleout_type);          // every row is cast as it is staged, flat ones too
    const Type staged_type = flat && !casts ? type : scaleout_type;
    // With float32 on the wire and one domain, the only row that a rank has of a token travels as it is, in half the bytes, with its
    // weight, by which the source rank multiplies it. The bits are those of a float32 sum.
    const bool single_rows_travel = !flat && r.domains() == 1 && staged_type == Type::fp32 && type != Type::fp32;
    const bool unsummed = a.unsummed != 0;         // source ranks read all rows in place, and no rank adds up its own
    const bool own_weights = a.topk_weights != 0;  // combine's caller passes them; the dispatch's weights are not used
    const bool past_cache = a.num_tokens * a.y_stride >= kPastCache;
    // The experts' rows are in this rank's window: peers read them there and nothing is staged.
    const bool in_place = unsummed || (!casts && a.weight_grads == 0 && a.y >= heap() && a.y < window_of(a.ctx, r.me) + a.ctx.window.bytes);
    const i64 grads_at =
        shape.staged_row_bytes - align_up<i64>(topk * sizeof(float), 16);  // offset of the weight gradients in a staged row
    const SourceTokens* const sent = memory<const SourceTokens>(a.route.sent);

    // Number of chunks in the dispatch of `source_rank`.
    i32 chunks_of(i32 source_rank) const { return ceil_div(sent[source_rank].num_tokens, sent[source_rank].chunk_tokens); }
    // True if rows of `source_rank`, in another domain, are put to it without a return-forwarder.
    bool direct_to(i32 source_rank) const { return !r.reaches(source_rank) && goes_direct(shape, sent[source_rank].num_tokens); }
    u8* put_by(i32 owner, i32 token) const { return at<u8>(a.ctx, r.me, direct_row_at(a.ctx.window, shape, r.tag, owner, token)); }
    // The tagged word in the window of `owner` with the weight that `source_rank` passed for its token's k-th expert.
    u64* weight(i32 owner, i32 source_rank, i32 token, i32 k) const {
        return at<u64>(a.ctx, owner, weight_at(a.ctx.window, shape, r.tag, source_rank, token * topk + k));
    }
    // The weight that `source_rank` passed.  Call only after missing_weight() has returned null; this rank's own weights are always valid.
    float own_weight(i32 source_rank, i32 token, i32 k) const {
        if (source_rank == r.me) return memory<const float>(a.topk_weights)[static_cast<i64>(token) * topk + k];
        const u32 bits = signal_word(load_relaxed(weight(r.me, source_rank, token, k)));
        float number;
        std::memcpy(&number, &bits, sizeof(number));
        return number;
    }
    // The weight of a row that `owner` publishes in place, that of the token's k-th expert.
    float weight_in_place(i32 owner, i64 row, i32 source_rank, i32 token, i32 k) const {
        if (a.weighted == 0) return 1.0f;
        if (own_weights) return own_weight(source_rank, token, k);
        return at<const float>(a.ctx, owner, r.header(owner).combine.weights)[row];
    }
    // The weight of a staged row that travels as it is, behind its columns.
    float& staged_weight(u8* staged) const { return *reinterpret_cast<float*>(staged + a.hidden * bytes_of(type)); }
    u8* staged(i32 rank, i32 source_rank, i32 token) const {
        return at<u8>(a.ctx, rank, staged_at(a.ctx.window, shape, source_rank, token));
    }
    // Hash a row that travels in one piece: `bytes` of it, and the weight gradients behind it.
    u64 hash_of(const u8* row, i64 bytes) const {
        const bool grads = a.weight_grads != 0 || a.out_weight_grads != 0;
        return hash_row(row, bytes, grads ? hash_row(row + grads_at, topk * sizeof(float)) : 0);
    }
    // Bytes of a staged row; `single`: of a row that travels as it is.
    i64 staged_bytes(bool single) const {
        if (!single) return moecomm::staged_bytes(staged_type, a.hidden);
        return a.hidden * bytes_of(type) + static_cast<i64>(own_weights ? 0 : sizeof(float));
    }
    // True if all headers have arrived and the round is valid.  agreed() does not wait; await_agreement() waits for the headers.
    bool agreed() { return r.headers_in() && r.validate_headers().failure == Failure::none; }
    bool await_agreement() { return r.await_headers() && r.validate_headers().failure == Failure::none; }

  private:
    u64 heap() const { return window_of(a.ctx, r.me) + a.ctx.window.heap; }
};

}  // namespace moecomm::host
