// Combine on the host: announce, await drained staging, reduce, pull.
#include <algorithm>
#include <vector>

#include "executor.h"
#include "round.h"
#include "rows.h"
#include "team.h"

namespace moecomm::host {

namespace {

constexpr i32 kColumns = 1024;  // summed and rounded at once: 4 KB of sums stay in the first-level cache
constexpr i32 kGroup = kMinChunk;

// One call of one rank.  Threads of the rank share it and take every `stride`-th block and group.
struct Combine {
    explicit Combine(const CombineArgs& args) : a(args), r(args.ctx, Op::combine) {}

    const CombineArgs& a;
    Round r;
    const i32 topk = a.ctx.shape.topk;
    const bool flat = a.layout == static_cast<i32>(Layout::flat);
    const Type type = static_cast<Type>(a.type);
    const Type staged_type = flat ? type : static_cast<Type>(a.wire);  // of the numbers in a staged row
    const bool past_cache = a.num_tokens * a.y_stride >= kPastCache;
    // The experts' rows lie in our window: peers read them there, and nothing is staged.
    const bool in_place = a.weight_grads == 0 && a.y >= heap() && a.y < a.ctx.peers[r.me] + a.ctx.window.bytes;
    const i64 pitch = a.ctx.shape.staged_row_bytes;
    const i64 grads_at = pitch - align_up<i64>(topk * sizeof(float), 16);  // in a staged row
    const i32* const source_base = memory<const i32>(a.route.source_base);
    const i32* const slot_base = memory<const i32>(a.route.slot_base);

  private:
    u64 heap() const { return a.ctx.peers[r.me] + a.ctx.window.heap; }
};

void announce(Combine& c) {
    Notice n{};
    n.call = c.a.call;
    n.num_tokens = c.a.num_tokens;
    n.staging = c.a.ctx.window.staging;
    if (c.in_place) {
        const u64 window = c.a.ctx.peers[c.r.me];
        n.x = c.a.y - window;
        n.pitch = static_cast<u64>(c.a.y_stride);
        if (!c.flat && c.a.weighted != 0) n.weights = c.a.route.row_weights - window;
    }
    c.r.announce(n, nullptr);
}

// Every rank has read what we offered in combine `round`.  A rank that wants none of our rows may be a combine ahead of us, and so its
// flag.
bool await_drained(Combine& c, u32 round) {
    for (i32 p = 0; p < c.r.ranks; ++p) {
        const u64* flag = at<u64>(c.a.ctx, c.r.me, drained_at(c.a.ctx.window, p));
        const auto drained = [&] { return static_cast<i32>(signal_tag(load_acquire(flag)) - round) >= 0; };
        if (!c.r.watch.until(Phase::drained, drained, [&] { return Missing{p, flag, round}; })) return false;
    }
    return true;
}

// The sum over the rows of flat row `slot` here, in the order of k.
void reduce_row(const Combine& c, i32 slot, u8* staged, float* scratch) {
    const i32* rows = memory<const i32>(c.a.route.rows) + static_cast<i64>(slot) * c.topk;
    const float* row_weights = memory<const float>(c.a.route.row_weights);
    Addends from;
    from.type = c.type;
    for (i32 k = 0; k < c.topk; ++k)
        if (rows[k] >= 0) from.add(memory<const u8>(c.a.y) + rows[k] * c.a.y_stride, c.a.weighted != 0 ? row_weights[rows[k]] : 1.0f);
    if (c.staged_type == Type::fp32) return sum_rows(reinterpret_cast<float*>(staged), from, 0, c.a.hidden);
    for (i64 column = 0; column < c.a.hidden; column += kColumns) {
        const i64 n = std::min<i64>(kColumns, c.a.hidden - column);
        sum_rows(scratch, from, column, n);
        round_row(staged + column * bytes_of(c.staged_type), scratch, c.staged_type, n);
    }
}

// The gradients of the token's weights travel at the end of its row.
void stage_grads(const Combine& c, i32 slot, u8* staged) {
    const float* grads = memory<const float>(c.a.weight_grads);
    const i32* rows = memory<const i32>(c.a.route.rows) + static_cast<i64>(slot) * c.topk;
    float* out = reinterpret_cast<float*>(staged + c.grads_at);
    for (i32 k = 0; k < c.topk; ++k) {
        if (c.flat) {
            out[k] = grads[static_cast<i64>(slot) * c.topk + k];
        } else {
            out[k] = rows[k] >= 0 ? grads[rows[k]] : 0.0f;
        }
    }
}

i32 blocks_of(const Combine& c, i32 source) { return ceil_div(c.source_base[source + 1] - c.source_base[source], kMinChunk); }

void reduce_block(const Combine& c, i32 source, i32 block, float* scratch) {
    const i32 first = c.source_base[source] + block * kMinChunk;
    const i32 end = std::min(first + kMinChunk, c.source_base[source + 1]);
    for (i32 slot = first; slot < end; ++slot) {
        u8* staged = at<u8>(c.a.ctx, c.r.me, c.a.ctx.window.staging) + slot * c.pitch;
        if (c.flat) {
            copy_row(staged, memory<const u8>(c.a.y) + slot * c.a.y_stride, c.a.hidden * bytes_of(c.type), c.past_cache);
        } else {
            reduce_row(c, slot, staged, scratch);
        }
        if (c.a.weight_grads != 0) stage_grads(c, slot, staged);
    }
    order_copied_rows();
    store_release(at<u64>(c.a.ctx, source, reduced_at(c.a.ctx.window, c.r.me, block)), tag_signal(c.r.tag));
}

// Brings home the tokens of one thread: every `stride`-th group of kGroup tokens.
class Home {
  public:
    Home(Combine& c, i32 worker, i32 stride, float* scratch) : c_(c), scratch_(scratch) {
        for (i32 first = worker * kGroup; first < c.a.num_tokens; first += stride * kGroup) pending_.push_back(first);
    }
    // The groups whose rows are all here, up to the first that is not.
    void pull_reduced_in_order() {
        size_t done = 0;
        while (done < pending_.size() && pull_if_reduced(pending_[done])) ++done;
        pending_.erase(pending_.begin(), pending_.begin() + done);
    }
    // All the rest, in whatever order the rows become ready.
    void pull_all() {
        while (!pending_.empty()) {
            auto left = std::remove_if(pending_.begin(), pending_.end(), [&](i32 first) { return pull_if_reduced(first); });
            pending_.erase(left, pending_.end());
            if (pending_.empty()) return;
            if (!c_.r.watch.until(Phase::reduced, [&] { return any_reduced(); }, [&] { return missing(pending_.front()); })) return;
        }
    }

  private:
    // The first row of the group that is not reduced yet; peer -1 if all are.
    Missing missing(i32 first) const;
    bool any_reduced() const {
        return std::any_of(pending_.begin(), pending_.end(), [&](i32 first) { return missing(first).peer < 0; });
    }
    bool pull_if_reduced(i32 first);
    void pull(i32 token);
    const u8* single_row(i32 rank, i32 slot) const;
    void add_in_place(float* sum, i32 token, i32 rank, i64 column, i64 n) const;
    void add_up(float* sum, i32 token, const i32* slot, i64 column, i64 n) const;
    void bring_grads(i32 token, const i32* slot) const;

    Combine& c_;
    float* scratch_;
    std::vector<i32> pending_;
};

Missing Home::missing(i32 first) const {
    const i32 end = std::min(first + kGroup, c_.a.num_tokens);
    for (i32 token = first; token < end; ++token) {
        const i32* slot = memory<const i32>(c_.a.route.token_slot) + static_cast<i64>(token) * c_.r.ranks;
        for (i32 p = 0; p < c_.r.ranks; ++p) {
            if (slot[p] < 0 || c_.r.notice(p).x != 0) continue;
            const i32 block = (slot[p] - c_.slot_base[p]) / kMinChunk;
            const u64* flag = at<const u64>(c_.a.ctx, c_.r.me, reduced_at(c_.a.ctx.window, p, block));
            if (!has_tag(flag, c_.r.tag)) return {p, flag, c_.r.tag};
        }
    }
    return {-1, nullptr, 0};
}

bool Home::pull_if_reduced(i32 first) {
    if (missing(first).peer >= 0) return false;
    for (i32 token = first; token < std::min(first + kGroup, c_.a.num_tokens); ++token) pull(token);
    return true;
}

// What `rank` holds of the token, where it has one row for it: a reduced one or, in place, the caller's own.  Null: several, in place.
const u8* Home::single_row(i32 rank, i32 slot) const {
    const Notice& from = c_.r.notice(rank);
    if (from.x == 0) return at<const u8>(c_.a.ctx, rank, from.staging) + slot * c_.pitch;
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
    float partial[kColumns];
    sum_rows(partial, rows, column, n);
    if (c_.staged_type == Type::fp32) return add_row(sum, reinterpret_cast<const u8*>(partial), Type::fp32, n);
    u8 rounded[kColumns * sizeof(u16)];
    round_row(rounded, partial, c_.staged_type, n);
    add_row(sum, rounded, c_.staged_type, n);
}

// The sum over the ranks, in the order of the ranks.
void Home::add_up(float* sum, i32 token, const i32* slot, i64 column, i64 n) const {
    Addends rows;
    rows.type = c_.staged_type;
    bool several = false;
    for (i32 p = 0; p < c_.r.ranks && !several; ++p) {
        if (slot[p] < 0) continue;
        const u8* row = single_row(p, slot[p]);
        several = row == nullptr;
        rows.add(row, 1.0f);
    }
    if (!several) return sum_rows(sum, rows, column, n);
    std::fill_n(sum, n, 0.0f);
    for (i32 p = 0; p < c_.r.ranks; ++p) {
        if (slot[p] < 0) continue;
        const u8* row = single_row(p, slot[p]);
        if (row == nullptr) {
            add_in_place(sum, token, p, column, n);
        } else {
            add_row(sum, row + column * bytes_of(c_.staged_type), c_.staged_type, n);
        }
    }
}

void Home::bring_grads(i32 token, const i32* slot) const {
    const CombineArgs& a = c_.a;
    for (i64 entry = static_cast<i64>(token) * c_.topk, k = 0; k < c_.topk; ++entry, ++k) {
        const i32 owner = memory<const i32>(a.route.token_owner)[entry];
        float* grad = memory<float>(a.out_weight_grads) + entry;
        *grad = owner < 0 ? 0.0f : at<float>(a.ctx, owner, c_.r.notice(owner).staging + slot[owner] * c_.pitch + c_.grads_at)[k];
    }
}

// The sum, then the bias, then one rounding.
void Home::pull(i32 token) {
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
    if (a.out_weight_grads != 0) bring_grads(token, slot);
}

// Reduces the rows here block by block, the same block of every source before the next: the tokens whose rows are all reduced come home
// in between, while those rows are still in the cache.
void reduce_and_pull(Combine& c, i32 worker, i32 stride) {
    float scratch[kColumns];
    Home home(c, worker, stride, scratch);
    i32 blocks = 0;
    for (i32 source = 0; source < c.r.ranks; ++source) blocks = std::max(blocks, blocks_of(c, source));
    bool agreed = false;
    for (i32 block = worker; block < blocks && !c.in_place; block += stride) {
        for (i32 turn = 0; turn < c.r.ranks; ++turn)
            if (const i32 source = c.r.peer(turn); block < blocks_of(c, source)) reduce_block(c, source, block, scratch);
        agreed = agreed || (c.r.notices_in() && c.r.judge().failure == Failure::none);
        if (agreed) home.pull_reduced_in_order();
    }
    if (c.r.await_notices() && c.r.judge().failure == Failure::none) home.pull_all();
}

// Our staged rows of the next combine may overwrite theirs once everybody has said so.
void tell_drained(Combine& c) {
    for (i32 turn = 0; turn < c.r.ranks; ++turn)
        store_release(at<u64>(c.a.ctx, c.r.peer(turn), drained_at(c.a.ctx.window, c.r.me)), tag_signal(c.r.tag));
    c.r.state.last_combine = c.r.tag;
}

}  // namespace

void combine(const CombineArgs& args) {
    Combine c(args);
    if (c.r.watch.aborted()) return;
    Team team(args.workers);
    announce(c);
    // Our staging may still hold the rows of our last combine.
    if (const u32 last = c.r.state.last_combine; last != 0 && !await_drained(c, last)) return;
    team.run([&](i32 worker) { reduce_and_pull(c, worker, team.size()); });
    if (c.r.watch.failed()) return;
    const Verdict verdict = c.r.judge();
    if (verdict.failure == Failure::none) {
        tell_drained(c);
        if (c.in_place && !await_drained(c, c.r.tag)) return;  // the caller may do with its rows what it likes when we return
    } else {
        c.r.leave_verdict(verdict);
    }
    c.r.finish();
}

}  // namespace moecomm::host
