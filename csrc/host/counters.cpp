#include "counters.h"

#include "window.h"

namespace moecomm::host {

namespace {

void add(const Context& ctx, u64 offset, u64 n) { add_relaxed(at<u64>(ctx, ctx.rank, offset), n); }

void add(const Context& ctx, Counter which, i32 index, u64 n) { add(ctx, counter_at(ctx.window, ctx.shape, which, index), n); }

}  // namespace

void count_round(const Context& ctx) { add(ctx, rounds_counter_at(ctx.window), 1); }

void count_rows(const Dispatch& d) {
    const Context& ctx = d.a.ctx;
    const u64 bytes = static_cast<u64>(d.a.row_bytes) + static_cast<u64>(d.a.scale_bytes);
    i32 *const from = traffic_of(d.a.route, d.r.ranks), *const to = from + d.r.ranks;
    for (i32 p = 0; p < d.r.ranks; ++p) {
        if (!d.repeat) {
            from[p] = d.r.count_of(p, ctx.shape.slots + d.r.me);
            to[p] = d.r.count_of(d.r.me, ctx.shape.slots + p);
        }
        const u64 in = static_cast<u32>(from[p]), out = static_cast<u32>(to[p]);
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
