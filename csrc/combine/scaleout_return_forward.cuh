// Return-forward: for each token of another domain, adds up the rows of this domain and puts one sum to the source rank.
#pragma once
#include "cast_rows.cuh"
#include "gather_rows.cuh"
#include "pull.cuh"
#include "scaleout_direct.cuh"

namespace moecomm {

// The role of a return-forward warp. The warps of the grid divide the chunks of all source ranks that this rank forwards for, in order. A
// warp puts the sums of a chunk when they are complete, those of consecutive tokens at once, and then signals the source rank. Where a
// message costs much, chunks have many tokens, and the warps of a block share each: the last one puts it. All lanes call all methods
// together.
template <class Call>
struct ReturnForward {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr Type kType = cfg.staged();
    static constexpr i32 kRowBytes = cfg.value_bytes();
    static constexpr bool kSingles = false, kAddsDomains = false, kNests = false, kFactors = false, kCopies = false, kSets = false;
    static constexpr bool kCasts = cfg.casts();
    static constexpr bool kHashes = cfg.verifies, kHashesSums = cfg.verifies;
    static constexpr i32 kPieces = ceil_div(kRowBytes, cfg.pull_bytes);
    static constexpr i32 kOthers = cfg.domains() - 1;
    // Where a message costs so much, chunks have many tokens (moecomm/backends/gin.py), and one warp would take long to add them up.
    static constexpr bool kShares = Call::Transport::worth_a_message >= 64 * 1024;

    const Call& c;
    const i32 warp;                              // among those of the block
    const i32 work_list;                         // number of work items of all return-forward warps
    i32 nth;                                     // this warp's next work item
    i32 ended = 0;                               // kShares: work items that this warp has ended
    u32 tokens_left = 0;                         // one bit for each of its remaining tokens that this domain has rows of
    i32 slot = -1, next_slot = -1;               // this lane's slots of its next token and of the one after it, loaded ahead
    u64* hash = nullptr;                         // see gather.cuh
    bool item_open = false, place_free = false;  // `tokens_left` is known; the places of its sums are free
    i32 seen = -1;                               // the work item for which this lane has acquired the flag of its rank
    bool failed = false;

    MOECOMM_FN ReturnForward(const Call& call, i32 this_warp)
        : c(call), warp(this_warp), work_list(count(call)), nth(blockIdx.x + (kShares ? 0 : gridDim.x * this_warp)) {}

    MOECOMM_FN static i32 count(const Call& c) {
        i32 most = 0;
        for (i32 n = 0; n < c.shared.forwarders.count(); ++n) most = max(most, forwarded(c, c.shared.forwarders.source_of(c.domains(), n)));
        return most * c.shared.forwarders.count();
    }
    // Number of chunks of a source rank that this rank forwards.
    MOECOMM_FN static i32 forwarded(const Call& c, i32 source_rank) {
        return source_rank < 0 || c.direct_to(source_rank) ? 0 : c.chunks_of(source_rank);
    }
    // The column of a work item, as Forwarders numbers them: work items go through the columns of a chunk, then of the next.
    MOECOMM_FN i32 nth_column(i32 work) const {
        const i32 shares = (1 << c.shared.forwarders.share_bits) - 1;
        return work % kOthers + (work / kOthers & shares) * kOthers;
    }
    MOECOMM_FN i32 column_of_work(i32 work) const { return c.shared.forwarders.column_of(c.domains(), nth_column(work)); }
    MOECOMM_FN i32 source_rank_of(i32 work) const { return c.shared.forwarders.source_of(c.domains(), nth_column(work)); }
    MOECOMM_FN i32 chunk_of(i32 work) const { return work / kOthers >> c.shared.forwarders.share_bits; }
    MOECOMM_FN const SourceTokens& sent_by(i32 work) const { return c.shared.sent[source_rank_of(work)]; }
    MOECOMM_FN i32 ring_of(i32 work) const { return ring_chunks(c.shape(), sent_by(work).chunk_tokens); }

    // The words that dispatch recorded in the route for a forwarded token.
    MOECOMM_FN const i32* kept(i32 source_rank, i32 token) const {
        return reinterpret_cast<const i32*>(c.a.route.forwarded) +
               (static_cast<i64>(source_rank) * c.shape().max_tokens + token) * forwarded_words(c.shape());
    }
    // Returns one bit for each token of the chunk that this domain has rows of.
    MOECOMM_FN u32 tokens_of(i32 work) const {
        const SourceTokens& sent = sent_by(work);
        const i32 token = chunk_of(work) * sent.chunk_tokens + lane_id();
        bool any = false;
        if (lane_id() < sent.chunk_tokens && token < sent.num_tokens) {
            const i32* slots = kept(source_rank_of(work), token) + 2 * cfg.topk;
            for (i32 i = 0; i < cfg.scaleup_ranks(); ++i) any |= slots[i] >= 0;  // all loads at once
        }
        return __ballot_sync(kAllLanes, any);
    }
    MOECOMM_FN i32 first_token(u32 tokens) const { return chunk_of(nth) * sent_by(nth).chunk_tokens + __ffs(tokens) - 1; }
    // Loads the slot of the first token of a mask at the rank of this domain that this lane serves.
    MOECOMM_FN i32 slot_of_first(u32 tokens) const {
        if (tokens == 0 || lane_id() >= cfg.scaleup_ranks()) return -1;
        return kept(source_rank_of(nth), first_token(tokens))[2 * cfg.topk + lane_id()];
    }
    // kShares: the work items that warps of this block have ended. Rings have no other use on a transport whose messages cost so much.
    MOECOMM_FN auto& ended_by_all() const {
        using Counters = StepCounters<cfg.return_forward_warps>;
        static_assert(sizeof(Counters) <= sizeof(typename Call::Transport::Ring));
        return reinterpret_cast<Counters&>(put_rings<typename Call::Transport>(c.shared)[0]);
    }
    // kShares: one bit for each token of the chunk that is this warp's.
    MOECOMM_FN u32 share_of(i32 work) const {
        const i32 tokens = ceil_div(sent_by(work).chunk_tokens, cfg.return_forward_warps), first = tokens * warp;
        return first < kWarp ? ((1ull << tokens) - 1) << first : 0;
    }
    MOECOMM_FN void begin_work() {
        tokens_left = tokens_of(nth);
        if constexpr (kShares) tokens_left &= share_of(nth);
        slot = slot_of_first(tokens_left);
        next_slot = slot_of_first(tokens_left & (tokens_left - 1));
        item_open = true;
        place_free = tokens_left == 0 || chunk_of(nth) < ring_of(nth);
    }
    MOECOMM_FN void end_work() {
        nth += gridDim.x * (kShares ? 1 : cfg.return_forward_warps);
        item_open = false;
    }

    // Returns whether the source rank has pulled the chunk that held the places of this chunk's sums before, here and at the source rank.
    MOECOMM_FN bool await_place(bool may_wait) {
        if (place_free) return true;
        const i32 before = chunk_of(nth) - ring_of(nth), column = column_of_work(nth), chunk_tokens = sent_by(nth).chunk_tokens;
        bool free = true;
        if (lane_id() == 0)
            free = may_wait ? await_signal(c, c.transport, Phase::drained, kReturnCredit, source_rank_of(nth), column, before, chunk_tokens)
                            : is_signaled(c, c.transport, kReturnCredit, column, before, chunk_tokens);
        place_free = __all_sync(kAllLanes, free);
        return place_free;
    }
    // Returns whether this lane may read the row of `rank`, as in Pull.
    MOECOMM_FN bool await_row(i32 rank, bool may_wait) {
        if (c.shared.headers[rank].combine.rows != 0 || seen == nth) return true;
        const u64 flag = c.reduced_flag(source_rank_of(nth), rank, chunk_of(nth));
        u64 tag = 0;
        if (may_wait ? !wait_flag(c.round, Phase::reduced, rank, flag, c.round.tag, tag)
                     : signal_tag(load_acquire(own<const u64>(c.a.ctx, flag))) != c.round.tag)
            return false;
        fence_async();  // reads of the row come after the flag
        seen = nth;
        return true;
    }
    MOECOMM_FN const u8* row_at(i32 rank, i32 slot, i32 token) const {
        const RoundHeader& from = c.shared.headers[rank];
        if (from.combine.rows == 0) return c.staged_row(rank, source_rank_of(nth), token);
        return c.transport.template peer_ptr<u8>(rank, from.combine.rows) + slot * static_cast<i64>(from.combine.pitch);
    }
    // Address of this domain's sum of a token, from which it is put.
    MOECOMM_FN u8* sum_of(i32 column, i32 token) const { return c.transport.template local<u8>(c.return_sum_at(column, token)); }

    // See gather.cuh. An item without a token ends a chunk without rows, or without rows of this warp's tokens. Sets `failed` if a wait
    // failed.
    MOECOMM_FN Next open(const u8*& source, Item& out, bool may_wait) {
        while (!failed && nth < work_list && chunk_of(nth) >= forwarded(c, source_rank_of(nth))) end_work();
        if (failed || nth >= work_list) return Next::none;
        if (!item_open) begin_work();
        out = {0, 0, -1, column_of_work(nth), nth};
        if (tokens_left == 0) {  // no rows here, but its credits must be given in order
            end_work();
            return Next::item;
        }
        const i32 token = first_token(tokens_left), rank = c.domains().first() + lane_id();
        const bool missing = !await_place(may_wait) || (slot >= 0 && !await_row(rank, may_wait));
        if (__any_sync(kAllLanes, missing)) {
            failed = may_wait;
            return may_wait ? Next::none : Next::later;
        }
        out.token = token;
        if (slot >= 0) source = row_at(rank, slot, token);
        if (c.a.weight_grads != 0) load_grads(out.ring_column, token);
        if constexpr (kHashes) {
            for (i32 i = lane_id(); i < Call::kToldWords; i += kWarp) told(out.ring_column, token)[i] = 0;
            hash = told(out.ring_column, token) + 1 + lane_id();
        }
        tokens_left &= tokens_left - 1;
        slot = next_slot;
        next_slot = slot_of_first(tokens_left & (tokens_left - 1));
        if (tokens_left == 0) {
            end_work();
        } else {
            out.step = -1;
        }
        return Next::item;
    }
    MOECOMM_FN static i32 pieces() { return kPieces; }
    // Verified rounds: what is told beside a sum.
    MOECOMM_FN u64* told(i32 column, i32 token) const { return reinterpret_cast<u64*>(sum_of(column, token) + c.told_at()); }
    template <i32 vectors, i32 n>
    MOECOMM_FN void cast(const Item& item, u8* row, float (&sum)[vectors][n], u32 has) const {
        const u64 found = store_cast<cfg>(row, item.column + lane_id() * n, sum, has);
        if constexpr (cfg.verifies) add_hash_of_lanes(told(item.ring_column, item.token), found);
    }
    MOECOMM_FN void add_sum_hash(const Item& item, i32 vectors) const {
        constexpr i32 bytes = columns_in_16(kType) * bytes_of(cfg.wire);
        u64 found = 0;
        for (i32 vector = lane_id(); vector < vectors; vector += kWarp)
            found += hash_stored(sum_of(item.ring_column, item.token), item.column * bytes_of(cfg.wire) + vector * bytes, bytes);
        add_hash_of_lanes(told(item.ring_column, item.token), found);
    }

    // Copies the token's gradients of weights, one in each lane, from the owner of its expert in this domain. Another lane acquired that
    // owner's flag; __syncwarp passes this on.
    MOECOMM_FN void load_grads(i32 column, i32 token) const {
        __syncwarp();
        if (lane_id() >= cfg.topk) return;
        const auto staged = [&](i32 rank) {
            return load_relaxed(reinterpret_cast<const u32*>(c.staged_row(rank, source_rank_of(nth), token) + c.grads_at()) + lane_id());
        };
        const i32 owner = kept(source_rank_of(nth), token)[cfg.topk + lane_id()];
        u32 grad = 0;
        if constexpr (cfg.sum_grads) {
            float sum = 0.0f;
#pragma unroll 1
            for (i32 n = 0; n < cfg.scaleup_ranks(); ++n)
                if (kept(source_rank_of(nth), token)[2 * cfg.topk + n] >= 0)
                    sum = __fadd_rn(sum, __uint_as_float(staged(c.domains().first() + n)));
            grad = __float_as_uint(sum);
        } else if (owner >= 0 && c.domains().reaches(owner)) {
            grad = staged(owner);
        }
        reinterpret_cast<u32*>(sum_of(column, token) + c.grads_at())[lane_id()] = grad;
    }

    MOECOMM_FN u8* target(const Item& item) const { return item.token >= 0 ? sum_of(item.ring_column, item.token) : nullptr; }
    template <i32 n>
    MOECOMM_FN void store(u8* row, i32 column, const float (&sum)[n]) const {
        store_columns<cfg.wire>(row + column * bytes_of(cfg.wire), sum);
    }

    MOECOMM_FN void close(const Item& out) {
        if (failed) return;
        if (out.step < 0) return;
        if constexpr (kShares) {
            if (!complete_step(ended_by_all(), c.round, ended++)) return;
        }
        if (!(put_sums(out.step) && finish_work(out.step))) failed = true;
    }
    // Puts the chunk's sums, one put for each run of consecutive tokens; the last one carries the signal. A chunk of which this domain has
    // no rows is not signaled. A chunk lies in one piece in a ring, whose length it divides. Returns false in all lanes if a put found no
    // room in time; the failure record is filled.
    MOECOMM_FN bool put_sums(i32 work) const {
        __syncwarp();  // all lanes have stored their columns
        const PeerRing ring{source_rank_of(work), column_of_work(work), c.domains().own()};
        const i32 first = chunk_of(work) * sent_by(work).chunk_tokens;
        const auto channel = c.put_channel(warp);
        for (Runs runs{tokens_of(work)}; runs.next();) {
            const i32 token = first + runs.first;
            const u64 to = c.returned_sum_at(ring.there, token), from = c.return_sum_at(ring.column, token);
            const u64 bytes = runs.count * c.sum_bytes();
            const bool fine = runs.left == 0 ? put_and_signal_chunk(c, channel, Phase::reduced, kReturned, ring, chunk_of(work),
                                                                    sent_by(work).chunk_tokens, to, from, bytes)
                                             : put(c, channel, Phase::reduced, ring.peer, to, from, bytes);
            if (!fine) return false;
        }
        return true;
    }
    MOECOMM_FN static bool is_staged(const RoundHeader& from) { return from.combine.rows == 0; }
    // Ends a work item: gives the owners of this domain the credit for its places, unless all publish their rows. Returns false in all
    // lanes if a wait failed.
    MOECOMM_FN bool finish_work(i32 work) const {
        const i32 source_rank = source_rank_of(work), chunk = chunk_of(work), chunk_tokens = sent_by(work).chunk_tokens;
        if (chunk + ring_of(work) >= c.chunks_of(source_rank) || !Pull<Call>::some(c, &is_staged)) return true;
        if (!await_earlier_credit(c, source_rank, chunk, chunk_tokens)) return false;
        const u64 place = credit_at(c.window(), c.shape(), source_rank, chunk, chunk_tokens);
        for (i32 step = lane_id(); step < cfg.scaleup_ranks() - 1; step += kWarp)
            c.transport.signal(c.domains().neighbor(step), place, word_signal(c.round.tag, chunk));
        __syncwarp();  // own credit last, as in Pull
        if (lane_id() == 0) c.transport.signal(c.me(), place, word_signal(c.round.tag, chunk));
        return true;
    }
};

// Called by each return-forward warp; await_all_headers runs together with the pull warps. Returns false if a wait failed; the failure
// record is filled.
template <class Call>
MOECOMM_FN bool return_forward_chunk(const Call& c, i32 warp) {
    const bool left = !c.leaves_early || put_direct(c, warp);
    if (!await_all_headers(c) || !left) return false;  // all these warps meet in the former
    if (c.shared.is_invalid != 0) return true;
    if (!c.leaves_early && !put_direct(c, warp)) return false;
    ReturnForward<Call> role(c, warp);
    GatherRows<typename ScaleoutShared<Call::cfg>::ReturnRing, ReturnForward<Call>>(c.scaleout().rings[warp], role).run();
    return !role.failed;
}

}  // namespace moecomm
