// Dispatch on the host: count, announce, await notices, send, receive.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "executor.h"
#include "plan.h"
#include "rows.h"
#include "team.h"

namespace moecomm::host {

namespace {

// One call of one rank.  Threads of the rank share it and take every `stride`-th chunk.
struct Dispatch {
    explicit Dispatch(const DispatchArgs& args) : a(args), r(args.ctx, Op::dispatch), plan(a, r) {}

    const DispatchArgs& a;
    Round r;
    Plan plan;
    const i32 topk = a.ctx.shape.topk;
    const bool flat = a.layout == static_cast<i32>(Layout::flat);
    const bool repeat = a.repeat != 0;
    const bool past_cache = static_cast<i64>(a.num_tokens) * a.row_bytes >= kPastCache;
    // Where our tokens go: written by place_token, or by an earlier dispatch that we repeat.
    i32* const token_rows = memory<i32>(a.route.token_rows);
    i32* const token_owner = memory<i32>(a.route.token_owner);
    i32* const token_slot = memory<i32>(a.route.token_slot);
};

void announce(Dispatch& d, const BadEntry& bad) {
    const DispatchArgs& a = d.a;
    Notice n{};
    n.status = static_cast<u32>(bad.argument);
    n.call = a.call;
    n.bad_value = bad.value;
    n.num_tokens = a.num_tokens;
    n.chunk_tokens = a.chunk_tokens;
    n.max_rows = a.max_rows;
    n.x = a.out_x;
    n.scales = a.out_scales;
    n.src = a.out_src;
    n.topk_idx = a.out_topk_idx;
    n.weights = a.out_weights;
    n.rows = a.out_rows;
    d.r.announce(n, d.repeat ? nullptr : d.plan.total_up(bad.argument != Argument::none));
}

// A row as it travels.
struct Payload {
    const u8* row;
    const u8* scales;
};

Payload pack(const DispatchArgs& a, i32 token, std::vector<u8>& packed) {
    const u8* row = memory<const u8>(a.x) + token * a.x_stride;
    if (a.quantize == 0) return {row, memory<const u8>(a.in_scales) + token * a.in_scales_stride};
    const i64 scales_at = align_up<i64>(a.row_bytes, sizeof(float));
    packed.resize(scales_at + a.scale_bytes);
    quantize_row(packed.data(), reinterpret_cast<float*>(packed.data() + scales_at), row, static_cast<Type>(a.in_type), a.hidden);
    return {packed.data(), packed.data() + scales_at};
}

void copy_payload(const Dispatch& d, i32 rank, i64 row, const Payload& from) {
    const Notice& to = d.r.notice(rank);
    copy_row(at<u8>(d.a.ctx, rank, to.x) + row * d.a.row_bytes, from.row, d.a.row_bytes, d.past_cache);
    if (d.a.scale_bytes > 0) std::memcpy(at<u8>(d.a.ctx, rank, to.scales) + row * d.a.scale_bytes, from.scales, d.a.scale_bytes);
}

// Takes the next row of each expert of the token, in the order of k, and the next flat row of each rank that owns one of them.
void place_token(const Dispatch& d, i32 token, i32* cursors) {
    i32* slot = d.token_slot + static_cast<i64>(token) * d.r.ranks;
    std::fill_n(slot, d.r.ranks, -1);
    for (i64 entry = static_cast<i64>(token) * d.topk; entry < (token + 1ll) * d.topk; ++entry) {
        const i64 id = d.plan.id_at(entry);
        const i32 owner = id < 0 ? -1 : d.plan.owner(id);
        d.token_owner[entry] = owner;
        d.token_rows[entry] = -1;
        if (owner < 0) continue;
        if (slot[owner] < 0) slot[owner] = cursors[d.a.ctx.shape.experts + owner]++;
        d.token_rows[entry] = d.flat ? slot[owner] : cursors[id]++;
    }
}

// Beside the row at `rank`: whose it is, which experts, which weights.
void send_metadata(const Dispatch& d, i32 token, i32 rank, i32 slot) {
    const DispatchArgs& a = d.a;
    const Notice& to = d.r.notice(rank);
    const i64 first = static_cast<i64>(token) * d.topk;
    const i64 there = static_cast<i64>(slot) * d.topk;
    const float* weight = memory<const float>(a.topk_weights);
    i32* src = to.src != 0 ? at<i32>(a.ctx, rank, to.src) : nullptr;
    float* weights = to.weights != 0 ? at<float>(a.ctx, rank, to.weights) : nullptr;
    for (i32 k = 0; k < d.topk; ++k) {
        const bool here = d.token_owner[first + k] == rank;
        const i32 row = d.token_rows[first + k];
        const float w = weight != nullptr ? weight[first + k] : 1.0f;
        if (!d.flat) {
            at<i32>(a.ctx, rank, to.rows)[there + k] = here ? row : -1;
            if (!here) continue;
            if (weights != nullptr) weights[row] = w;
        } else {
            if (weights != nullptr) weights[there + k] = here ? w : 0.0f;
            const i64 local = here ? d.plan.local(d.plan.id_at(first + k)) : -1;
            if (to.topk_idx != 0 && a.idx_bytes == 8) at<i64>(a.ctx, rank, to.topk_idx)[there + k] = local;
            if (to.topk_idx != 0 && a.idx_bytes == 4) at<i32>(a.ctx, rank, to.topk_idx)[there + k] = static_cast<i32>(local);
            if (!here) continue;
        }
        if (src == nullptr) continue;
        src[2ll * row] = d.r.me;
        src[2ll * row + 1] = token;
    }
}

// The row at `rank` that the payload is sent to: that of the first expert there.
i32 payload_row(const Dispatch& d, i32 token, i32 rank, i32 slot) {
    if (d.flat) return slot;
    const i64 first = static_cast<i64>(token) * d.topk;
    i32 k = 0;
    while (d.token_owner[first + k] != rank) ++k;
    return d.token_rows[first + k];
}

void send_chunk(const Dispatch& d, Plan& plan, i32 chunk, std::vector<u8>& packed) {
    const i32 first_token = chunk * d.a.chunk_tokens;
    const i32 end = std::min(first_token + d.a.chunk_tokens, d.a.num_tokens);
    i32* cursors = d.repeat ? nullptr : plan.cursors(chunk);
    i32 first[kMaxRanks] = {}, count[kMaxRanks] = {};
    for (i32 token = first_token; token < end; ++token) {
        if (!d.repeat) place_token(d, token, cursors);
        Payload payload{};
        for (i32 turn = 0; turn < d.r.ranks; ++turn) {
            const i32 rank = d.r.peer(turn);
            const i32 slot = d.token_slot[static_cast<i64>(token) * d.r.ranks + rank];
            if (slot < 0) continue;
            if (payload.row == nullptr) payload = pack(d.a, token, packed);
            copy_payload(d, rank, payload_row(d, token, rank, slot), payload);
            if (!d.repeat) send_metadata(d, token, rank, slot);
            if (count[rank]++ == 0) first[rank] = slot;
        }
    }
    order_copied_rows();
    for (i32 turn = 0; turn < d.r.ranks; ++turn) {
        const i32 rank = d.r.peer(turn);
        store_release(at<u64>(d.a.ctx, rank, arrived_at(d.a.ctx.window, d.r.me, chunk)), chunk_signal(d.r.tag, first[rank], count[rank]));
    }
}

// The chunks that one thread has yet to receive: every `stride`-th of each source, in order.
class Inbox {
  public:
    Inbox(Dispatch& d, i32 worker, i32 stride) : d_(d), stride_(stride), next_(d.r.ranks, worker) {}

    // Everything that is here by now.
    void take_arrived() {
        for (i32 turn = 0; turn < d_.r.ranks; ++turn)
            for (const i32 source = d_.r.peer(turn); arrived(source); next_[source] += stride_) fan_out(source, next_[source]);
    }
    // Is a chunk still missing that comes no later in its source than `chunk` in ours?
    bool behind(i32 chunk) const {
        for (i32 source = 0; source < d_.r.ranks; ++source)
            if (next_[source] <= chunk && open(source)) return true;
        return false;
    }
    // The rest, in whatever order it comes.
    void take_all() {
        for (take_arrived(); first_missing() >= 0; take_arrived())
            if (!d_.r.watch.until(Phase::payload, [&] { return any_arrived(); }, [&] { return missing(); })) return;
    }

  private:
    const u64* flag(i32 source, i32 chunk) const { return at<const u64>(d_.a.ctx, d_.r.me, arrived_at(d_.a.ctx.window, source, chunk)); }
    bool open(i32 source) const {
        const Notice& n = d_.r.notice(source);
        return next_[source] < ceil_div(n.num_tokens, n.chunk_tokens);
    }
    bool arrived(i32 source) const { return open(source) && has_tag(flag(source, next_[source]), d_.r.tag); }
    bool any_arrived() const {
        for (i32 source = 0; source < d_.r.ranks; ++source)
            if (arrived(source)) return true;
        return false;
    }
    i32 first_missing() const {
        for (i32 source = 0; source < d_.r.ranks; ++source)
            if (open(source)) return source;
        return -1;
    }
    Missing missing() const { return {first_missing(), flag(first_missing(), next_[first_missing()]), d_.r.tag}; }
    void fan_out(i32 source, i32 chunk) const;

    Dispatch& d_;
    const i32 stride_;
    std::vector<i32> next_;
};

// One row of a token has arrived; its other rows here are copies of it.
void Inbox::fan_out(i32 source, i32 chunk) const {
    if (d_.flat) return;
    const u64 signal = load_acquire(flag(source, chunk));
    const DispatchArgs& a = d_.a;
    const u8* x = at<const u8>(a.ctx, d_.r.me, a.out_x);
    const u8* scales = at<const u8>(a.ctx, d_.r.me, a.out_scales);
    for (i32 slot = signal_first(signal); slot < signal_first(signal) + signal_count(signal); ++slot) {
        const i32* rows = memory<const i32>(a.route.rows) + static_cast<i64>(slot) * d_.topk;
        i64 from = -1;
        for (i32 k = 0; k < d_.topk; ++k) {
            if (rows[k] < 0) continue;
            if (from < 0) {
                from = rows[k];
            } else {
                copy_payload(d_, d_.r.me, rows[k], {x + from * a.row_bytes, scales + from * a.scale_bytes});
            }
        }
    }
}

// Rows between a group's last token and the next group belong to nobody.
void clear_padding(const Dispatch& d) {
    if (d.a.layout != static_cast<i32>(Layout::expert)) return;
    i32* src = d.a.out_src != 0 ? at<i32>(d.a.ctx, d.r.me, d.a.out_src) : nullptr;
    float* weights = d.a.out_weights != 0 ? at<float>(d.a.ctx, d.r.me, d.a.out_weights) : nullptr;
    i64 start = 0;
    for (i32 e = 0; e < d.plan.experts_here(); ++e) {
        const Plan::Padding padding = d.plan.padding(e, start);
        for (i64 row = padding.filled; row < padding.end; ++row) {
            if (src != nullptr) src[2 * row] = src[2 * row + 1] = -1;
            if (weights != nullptr) weights[row] = 0.0f;
        }
        start = padding.end;
    }
}

BadEntry count(Dispatch& d, Team& team) {
    if (d.repeat) return {};
    std::vector<BadEntry> bad(team.size());
    team.run([&](i32 worker) {
        for (i32 chunk = worker; chunk < d.plan.own_chunks(); chunk += team.size()) bad[worker] = worse(bad[worker], d.plan.count(chunk));
    });
    BadEntry worst;
    for (const BadEntry& b : bad) worst = worse(worst, b);
    return worst;
}

Verdict judge(Dispatch& d) {
    const Verdict verdict = d.r.judge();
    if (verdict.failure != Failure::none || d.repeat) return verdict;
    d.plan.gather();
    return d.plan.judge_capacity();
}

// Sends our chunks and takes in what has arrived between them: those rows are still in the cache.  Where ranks outnumber cores, one that
// is ahead lets the others catch up.
void send_and_receive(Dispatch& d, i32 worker, i32 stride) {
    std::vector<u8> packed;
    Inbox inbox(d, worker, stride);
    for (i32 chunk = worker; chunk < d.plan.own_chunks(); chunk += stride) {
        send_chunk(d, d.plan, chunk, packed);
        inbox.take_arrived();
        if (inbox.behind(chunk)) std::this_thread::yield();
    }
    inbox.take_all();
}

}  // namespace

void dispatch(const DispatchArgs& args) {
    Dispatch d(args);
    if (d.r.watch.aborted()) return;
    Team team(args.workers);
    announce(d, count(d, team));
    if (!d.r.await_notices()) return;
    const Verdict verdict = judge(d);
    if (verdict.failure != Failure::none) {
        if (!d.repeat) d.plan.clear();
        d.r.leave_verdict(verdict);
        return d.r.finish();
    }
    if (!d.repeat) {
        d.plan.place();
        clear_padding(d);
    }
    team.run([&](i32 worker) { send_and_receive(d, worker, team.size()); });
    if (!d.r.watch.failed()) d.r.finish();
}

}  // namespace moecomm::host
