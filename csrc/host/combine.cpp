// Combine on CPU ranks: announce, wait until the staging of the last combine is drained, stage, pull.
#include "combine.h"

#include <algorithm>
#include <memory>

#include "executor.h"
#include "scaleout_return_forward.h"
#include "scaleout_source_rank.h"
#include "seal.h"
#include "stage.h"
#include "team.h"

namespace moecomm::host {

namespace {

void announce(Combine& c, bool intact) {
    const Timed timed = c.r.watch.timed("announce");
    RoundHeader n{};
    n.status = static_cast<u32>(intact ? Argument::none : Argument::handle);
    n.call = c.a.call;
    n.route_round = round_of(c.a.route, c.r.ranks);
    n.num_tokens = c.a.num_tokens;
    n.chunk_tokens = c.a.chunk_tokens;
    if (c.in_place) {
        const u64 window = window_of(c.a.ctx, c.r.me);
        n.combine.rows = c.a.y - window;
        n.combine.pitch = static_cast<u64>(c.a.y_stride);
        if (!c.flat && c.a.weighted != 0) n.combine.weights = c.a.route.row_weights - window;
    }
    c.r.announce(n, nullptr);
}

// Send this rank's weights as tagged words: each to the owner of its expert in this domain, all of them to every rank of other domains.
// The puts precede the round header, whose signal therefore covers them.
void post_weights(const Combine& c) {
    if (!c.own_weights || c.unsummed) return;
    const i32* owners = memory<const i32>(c.a.route.token_owner);
    const u32* bits = memory<const u32>(c.a.topk_weights);
    std::vector<u64> words(static_cast<size_t>(c.a.num_tokens * c.topk));
    for (i32 entry = 0; entry < c.a.num_tokens * c.topk; ++entry) {
        words[entry] = word_signal(c.r.tag, bits[entry]);
        if (owners[entry] >= 0 && c.r.reaches(owners[entry]))
            store_relaxed(c.weight(owners[entry], c.r.me, entry / c.topk, entry % c.topk), words[entry]);
    }
    for (i32 step = 0; step < c.r.ranks && !words.empty(); ++step) {
        if (const i32 to = c.r.peer(step); !c.r.reaches(to) && !c.r.masked(to))
            c.r.link().put(to, weight_at(c.a.ctx.window, c.shape, c.r.tag, c.r.me, 0), words.data(), words.size() * sizeof(u64));
    }
}

// The chunks that one thread pulls: of this rank's own tokens, and of the tokens that this rank return-forwards.
class Pulls {
  public:
    Pulls(Combine& c, i32 worker, i32 stride, float* scratch) : c_(c), times_(worker == 0) {
        all_.push_back(std::make_unique<SourceReduce>(c, worker, stride, scratch));
        for (i32 column = 0; c.r.domains() > 1 && column < c.r.columns(); ++column)
            if (c.r.source_of(column) >= 0) all_.push_back(std::make_unique<ReturnForward>(c, column, worker, stride, scratch));
    }

    void pull_in_order() {
        for (const auto& pull : all_) pull->pull_in_order();
    }
    bool pull_ready() {
        bool any = false;
        for (const auto& pull : all_) any = pull->pull_ready() || any;
        return any;
    }
    bool any_ready() const {
        return std::any_of(all_.begin(), all_.end(), [](const auto& pull) { return pull->any_ready(); });
    }
    // Pull all remaining chunks, waiting for each; return early if the round fails.
    void pull_all() {
        const auto open = [](const auto& pull) { return !pull->done(); };
        const auto first_open = [&] { return std::find_if(all_.begin(), all_.end(), open); };
        PeerWaits waits(c_.a.ctx, Counter::wait_combine);
        const auto any = [&] {
            if (times_) all_.front()->look_at_last(waits);
            return any_ready();
        };
        while (first_open() != all_.end()) {
            if (pull_ready()) continue;
            if (!c_.r.watch.until(Phase::reduced, any, [&] { return (*first_open())->missing(); })) return;
        }
    }

  private:
    Combine& c_;
    const bool times_;                        // one thread of the rank counts the time that it waits for each peer
    std::vector<std::unique_ptr<Pull>> all_;  // own tokens first
};

// Wait until every rank of this domain has read the rows that this rank published in the combine of tag `wanted`; no other rank reads them.
// A peer that wants no row of this rank may have finished the current combine already: its flag then carries a later tag.
// False if the round has failed.
bool await_drained(Combine& c, u32 wanted) {
    const Timed timed = c.r.watch.timed("drain");
    for (i32 p = c.r.first; p < c.r.first + c.r.scaleup_ranks; ++p) {
        if (c.r.masked(p)) continue;
        const u64* flag = at<u64>(c.a.ctx, c.r.me, drained_at(c.a.ctx.window, p));
        const auto drained = [&] { return has_reached(signal_tag(load_acquire(flag)), wanted, c.r.tag); };
        if (!c.r.watch.until(Phase::drained, drained, [&] { return Missing{p, flag, wanted}; })) return false;
    }
    return true;
}

const u64* credit_of(const Combine& c, i32 source_rank, i32 chunk) {
    return at<u64>(c.a.ctx, c.r.me, credit_at(c.a.ctx.window, c.shape, source_rank, chunk, c.sent[source_rank].chunk_tokens));
}

// True if the chunk's place in the staging ring is free, that is, if the chunk stored there before has been pulled.
bool has_place(const Combine& c, i32 source_rank, i32 chunk) {
    const i32 before = chunk - ring_chunks(c.shape, c.sent[source_rank].chunk_tokens);
    if (before < 0 || !rows_here(c, source_rank, chunk)) return true;
    return load_acquire(credit_of(c, source_rank, chunk)) == word_signal(c.r.tag, static_cast<u32>(before));
}

// Put the rows that go direct.  This comes first because it waits at most for round headers (where callers pass weights), and every rank
// sends those before it waits.  A source rank cannot pull, and so grants no credits, before all of its direct rows have been put.
void put_direct(Combine& c, DirectSends& sent, i32 worker, i32 stride, float* scratch) {
    for (i32 step = 0; step < c.r.ranks; ++step) {
        const i32 source_rank = c.r.peer(step);
        if (c.own_weights && c.direct_to(source_rank) && !c.await_agreement()) return;
        for (i32 chunk = worker; c.direct_to(source_rank) && chunk < c.chunks_of(source_rank); chunk += stride)
            put_chunk(c, sent, source_rank, chunk, scratch);
    }
}

// Stage this chunk for every source rank that has one.  While a place in the ring or a weight is missing, pull whatever is ready, because
// peers may wait for those credits.  False if the round has failed or is invalid.
bool stage_for_all(Combine& c, Pulls& pulls, i32 chunk, float* scratch) {
    i32 waiting[kMaxHostRanks], count = 0;  // source ranks
    for (i32 step = 0; step < c.r.ranks; ++step)
        if (const i32 source_rank = c.r.peer(step); chunk < c.chunks_of(source_rank) && !c.direct_to(source_rank))
            waiting[count++] = source_rank;
    const auto can_stage = [&](i32 source_rank) {
        return has_place(c, source_rank, chunk) && missing_weight(c, source_rank, chunk) == nullptr;
    };
    const auto find = [&] {
        const u64* weight = missing_weight(c, waiting[0], chunk);
        if (weight != nullptr) return Missing{waiting[0], weight, c.r.tag};
        return Missing{c.r.local(waiting[0]), credit_of(c, waiting[0], chunk), c.r.tag};
    };
    for (;;) {
        i32 left = 0;
        for (i32 i = 0; i < count; ++i) {
            if (can_stage(waiting[i])) {
                stage_chunk(c, waiting[i], chunk, scratch);
            } else {
                waiting[left++] = waiting[i];
            }
        }
        count = left;
        if (count == 0) return true;
        if (!c.await_agreement()) return false;
        if (pulls.pull_ready()) continue;
        const auto go_on = [&] { return std::any_of(waiting, waiting + count, can_stage) || pulls.any_ready(); };
        if (!c.r.watch.until(Phase::drained, go_on, find)) return false;
    }
}

// Stage this rank's rows, chunk i of every source rank before chunk i + 1 of any.  Tokens whose rows are all staged are pulled in between,
// while those rows are still in the cache.
void stage_and_pull(Combine& c, DirectSends& sent, i32 worker, i32 stride) {
    Timed timed = c.r.watch.timed("reduce");
    Sums scratch;
    Pulls pulls(c, worker, stride, scratch.of);
    i32 chunks = 0;
    for (i32 source_rank = 0; source_rank < c.r.ranks; ++source_rank) chunks = std::max(chunks, c.chunks_of(source_rank));
    put_direct(c, sent, worker, stride, scratch.of);
    for (i32 chunk = worker; chunk < chunks && !c.in_place; chunk += stride) {
        if (!stage_for_all(c, pulls, chunk, scratch.of)) return;
        if (c.agreed()) pulls.pull_in_order();
    }
    timed.next("pull");
    if (c.await_agreement()) pulls.pull_all();
}

// By source rank: the number of chunks whose rows this rank puts direct.
std::vector<i32> direct_chunks(const Combine& c) {
    std::vector<i32> chunks;
    for (i32 source_rank = 0; source_rank < c.r.ranks && c.r.domains() > 1; ++source_rank)
        chunks.push_back(c.direct_to(source_rank) ? c.chunks_of(source_rank) : 0);
    return chunks;
}

// Signal the ranks of this domain that this rank has read their rows.  A rank overwrites its staged rows once all have signaled.
void signal_drained(Combine& c) {
    for (i32 step = 0; step < c.r.scaleup_ranks; ++step)
        store_release(at<u64>(c.a.ctx, c.r.neighbor(step), drained_at(c.a.ctx.window, c.r.me)), tag_signal(c.r.tag));
    c.r.state.last_combine = c.r.tag;
}

// End the round of a rank whose handle is damaged: its header makes the round invalid on every rank.
void end_invalid(Combine& c) {
    if (!c.r.await_headers()) return;
    c.r.leave_validation_result(c.r.validate_headers());
    c.r.finish();
}

void combine_in_shared_rings(const CombineArgs& args, RowChecks* checks) {
    Combine c(args, checks);
    if (c.r.watch.aborted()) return;
    Team team(args.workers);
    const bool intact = is_intact(tables_of(args)) && !is_stale(c.r.mask, round_of(args.route, c.r.ranks));
    if (intact) check_in_place(c);
    if (intact) post_weights(c);
    announce(c, intact);
    if (!intact) return end_invalid(c);
    // Peers may still read the rows that this rank staged in its last combine.
    if (const u32 last = c.r.state.last_combine; last != 0 && !await_drained(c, last)) return;
    DirectSends sent(direct_chunks(c));
    team.run([&](i32 worker) { stage_and_pull(c, sent, worker, team.size()); });
    if (c.r.watch.failed()) return;
    const ValidationResult validation = c.r.validate_headers();
    if (validation.failure == Failure::none) {
        signal_drained(c);
        if (c.in_place && !await_drained(c, c.r.tag)) return;  // after return the caller may overwrite `y`
    } else {
        c.r.leave_validation_result(validation);
    }
    c.r.finish();
}

}  // namespace

void combine(const CombineArgs& args, RowChecks* checks) {
    with_shared_rings(args, [=](const CombineArgs& shared) { combine_in_shared_rings(shared, checks); });
}

}  // namespace moecomm::host
