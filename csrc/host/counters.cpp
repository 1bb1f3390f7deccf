#include "counters.h"

#include "window.h"

namespace moecomm::host {

namespace {

void add(const Context& ctx, u64 offset, u64 n) { __atomic_fetch_add(at<u64>(ctx, ctx.rank, offset), n, __ATOMIC_RELAXED); }

void add(const Context& ctx, Counter which, i32 index, u64 n) { add(ctx, counter_at(ctx.window, ctx.shape, which, index), n); }

// Rows of a source rank here. A repeat finds them in the tables of the dispatch that it repeats.
u64 rows_from(const Dispatch& d, i32 source) {
    if (!d.repeat) return d.r.count_of(source, d.a.ctx.shape.experts + d.r.me);
    const SourceTokens& sent = d.sent(source);
    const u32* ranges = memory<const u32>(d.a.route.ranges) + static_cast<i64>(source) * d.a.ctx.shape.max_tokens;
    u64 rows = 0;
    for (i32 chunk = 0; chunk < ceil_div(sent.num_tokens, sent.chunk_tokens); ++chunk) rows += signal_count(ranges[chunk]);
    return rows;
}

u64 rows_to(const Dispatch& d, i32 rank) {
    if (!d.repeat) return d.r.count_of(d.r.me, d.a.ctx.shape.experts + rank);
    u64 rows = 0;
    for (i64 token = 0; token < d.a.num_tokens; ++token) rows += d.token_slot[token * d.r.ranks + rank] >= 0;
    return rows;
}

}  // namespace

void count_round(const Context& ctx) { add(ctx, rounds_counter_at(ctx.window), 1); }

void count_rows(const Dispatch& d) {
    const Context& ctx = d.a.ctx;
    const u64 bytes = static_cast<u64>(d.a.row_bytes) + static_cast<u64>(d.a.scale_bytes);
    for (i32 p = 0; p < d.r.ranks; ++p) {
        const u64 in = rows_from(d, p), out = rows_to(d, p);
        add(ctx, Counter::rows_from, p, in);
        add(ctx, Counter::rows_to, p, out);
        add(ctx, Counter::bytes_from, p, in * bytes);
        add(ctx, Counter::bytes_to, p, out * bytes);
    }
    const i32* counts = memory<const i32>(d.a.tokens_per_expert);
    for (i32 e = 0; e < d.plan.experts_here(); ++e) add(ctx, Counter::expert_rows, e, static_cast<u64>(counts[e]));
}

void PeerWaits::look(i32 peer, bool arrived) {
    if (peer == ctx_.rank || (arrived && since_.empty())) return;
    if (since_.empty()) since_.resize(ctx_.shape.ranks);
    u64& since = since_[peer];
    if (!arrived && since == 0) since = now_ns();
    if (!arrived || since == 0) return;
    add(ctx_, which_, peer, now_ns() - since);
    since = 0;
}

PeerWaits::~PeerWaits() {
    for (i32 peer = 0; peer < static_cast<i32>(since_.size()); ++peer) look(peer, true);
}

}  // namespace moecomm::host
