// Step 3: the source rank pulls the rows of its tokens, at most one from each rank, and adds them in rank order; or, unsummed, every row,
// in the order of k.
//
// Rows are pulled, not pushed: rows in the window are read in place and need no receive buffer at the source rank. 16 blocks read at 0.97
// of the wire; more blocks are slower: 24 read at 0.94, 64 at 0.89 (bench/results/few-sms-h200-4.json; reads alone:
// all-to-all-h200-4.json).
#pragma once
#include "collect.cuh"
#include "gather.cuh"
#include "gather_rows.cuh"
#include "scaleout_source_rank.cuh"

namespace moecomm {

// Called by all pull and return-forward warps of a block together. Waits for every rank's round header and validates it; sets
// shared.is_invalid and reports the lowest rank whose header differs, if any. A fence and barriers order later reads of peers' rows after
// the headers. Returns false to all these threads if a header did not arrive; the failure record is filled.
template <class Call>
MOECOMM_FN bool await_all_headers(const Call& c) {
    constexpr CombineConfig cfg = Call::cfg;
    constexpr i32 threads = (cfg.pull_warps + cfg.return_forward_warps) * kWarp;
    const i32 thread = threadIdx.x - cfg.reduce_warps * kWarp;
    if constexpr (cfg.domains() > 1) {
        if (barrier_sync_any(1, threads, !await_tagged_words(c, thread, threads))) return false;
    }
    if (!await_headers<true>(c.round, c.shared.headers, thread, threads)) c.shared.missing = 1;
    if (!cfg.packets) fence_system();  // rows that peers publish were written before their headers
    barrier_sync(1, threads);
    if (c.shared.missing != 0) return false;
    // One warp, and of it the lane of the lowest rank that differs, as in Round::validate_headers: all blocks report the same rank.
    if (thread < kWarp) {
#pragma unroll
        for (i32 first = 0; first < cfg.ranks; first += kWarp) {
            const i32 from = first + thread;
            ValidationResult validation{Failure::none, Argument::none, -1, 0, 0};
            if (from < cfg.ranks) validation = validate_header(c.shared.mine, c.shared.headers[from], from, cfg.experts);
            const u32 differ = __ballot_sync(kAllLanes, validation.failure != Failure::none);
            if (differ == 0) continue;
            if (thread == __ffs(differ) - 1) {
                report_invalid(c.round, validation);
                c.shared.is_invalid = 1;
            }
            break;
        }
    }
    barrier_sync(1, threads);
    if constexpr (cfg.domains() > 1) {
        if (thread == 0) {
            asm volatile("fence.acq_rel.cta;" ::: "memory");  // release is_invalid, and what arrived before the tagged words
            *const_cast<volatile u32*>(&c.scaleout().headers_seen) = 1;
        }
    }
    if (cfg.packets) launch_dependents();
    fence_async();  // bulk reads of rows come after the headers
    return true;
}

// Called by all lanes of a warp before it gives the credit for a chunk of `source_rank`. Waits (acquire) for the earlier credit of the same
// place in the ring, which another warp may give: a chunk without rows is pulled at once. In order, a credit covers all credits before it.
// Returns false in all lanes if the wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN bool await_earlier_credit(const Call& c, i32 source_rank, i32 chunk, i32 chunk_tokens) {
    const i32 earlier = chunk - ring_chunks(c.shape(), chunk_tokens);
    if (earlier < 0) return true;
    const auto* place = own<const u64>(c.a.ctx, credit_at(c.window(), c.shape(), source_rank, earlier, chunk_tokens));
    const u64 credit = word_signal(c.round.tag, earlier);
    bool in_time = true;
    if (lane_id() == 0)
        in_time = wait_for(
            c.round, Phase::grid, c.me(), earlier, [&] { return load_acquire(place) == credit; },
            [&] { return static_cast<i64>(signal_word(load_acquire(place))); });
    return __all_sync(kAllLanes, in_time);  // before any lane leaves the next credit there
}

// In lane k, unsummed: the weight of the token's k-th row.
template <bool weighted>
struct WeightOfRow {};
template <>
struct WeightOfRow<true> {
    float factor = 1.0f;  // see gather.cuh
    float next_factor;    // of the next piece's token
};

// The role of a pull warp. Lane i serves the i-th rank that holds a part of the token (several domains: ScaleoutSums::kInRing); unsummed,
// the token's i-th row. All lanes call all methods together. Warps divide the work in one of two ways:
// - Where credits are needed, and with several domains, a chunk belongs to a block, which gives the credit; each warp of the block pulls
//   every pull_warps-th piece or, with several domains, token.
// - Otherwise warps claim pieces of all tokens from a counter, or complete tokens where flags have to be checked. Blocks with equally many
//   tokens have unequally many rows, and few blocks fill the links only while all of them pull.
template <class Call>
struct Pull : WeightOfRow<Call::cfg.unsummed && Call::cfg.weighted> {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr Type kType = cfg.staged();
    static constexpr i32 kRowBytes = cfg.value_bytes();
    static constexpr bool kSingles = cfg.single_rows_travel(), kFactors = cfg.unsummed && cfg.weighted, kCopies = false, kSets = false,
                          kCasts = false;
    static constexpr bool kHashes = cfg.verifies, kHashesSums = false, kStarts = cfg.bias_first;
    static constexpr bool kAddsDomains = cfg.domains() > 1, kSumsInRing = ScaleoutSums<Call>::kInRing;
    static constexpr bool kNests = kSumsInRing && ScaleoutSums<Call>::kOrdered;
    static constexpr Type kSingleType = cfg.type;
    static constexpr i32 kPieces = ceil_div(kRowBytes, cfg.pull_bytes), kPieceColumns = cfg.pull_bytes / bytes_of(kType);

    const Call& c;
    const i32 warp;
    const i32 shift;             // a chunk is 1 << shift tokens
    const bool whole_tokens;     // several domains: an item is a token; of few tokens, whose pieces all warps divide, a piece
    const bool gives_credit;     // peers stage rows, and not all of this rank's tokens fit their rings
    const i32 pieces_per_claim;  // pieces that a warp claims at once
    const i32 chunks_here;       // chunks of the block, where chunks belong to blocks
    i32 nth;                     // the next piece: of the block's, or of all tokens'
    i32 closing;                 // gives_credit: the oldest of its pieces whose sum is not stored
    u32 claimed = 0;             // in lane 0: the claim after that, made early to hide its latency
    i32 ahead;                   // this lane's slot of the next piece's token; unsummed: its row
    i32 owner = -1;              // single rows, unsummed: the owner of that token's k-th expert, in lane k
    const u8* weight = nullptr;  // see gather.cuh
    u64* hash = nullptr;         // likewise
    i32 seen = -1;               // the chunk for which this lane has acquired the flag of its rank
    i32 signaled = 0;            // chunks of the block at whose steps this warp has arrived
    bool failed = false;
    ScaleoutSums<Call> scaleout_sums;

    MOECOMM_FN Pull(const Call& call, i32 this_warp)
        : c(call),
          warp(this_warp),
          shift(__ffs(call.a.chunk_tokens) - 1),
          whole_tokens(cfg.domains() > 1 && !call.direct()),
          gives_credit((cfg.domains() > 1 || some(call, [](const RoundHeader& n) { return n.combine.rows == 0; })) &&
                       call.chunks() > ring_chunks(call.shape(), call.a.chunk_tokens)),
          pieces_per_claim(some(call, [](const RoundHeader& n) { return n.combine.rows == 0 || n.combine.is_reduced != 0; }) ? kPieces : 1),
          chunks_here(ceil_div(max(call.chunks() - static_cast<i32>(blockIdx.x), 0), static_cast<i32>(gridDim.x))),
          nth(by_chunks() ? this_warp * pieces() : (this_warp * pullers() + blockIdx.x) * pieces_per_claim),
          scaleout_sums{call, this_warp, cfg.domains() > 1 && call.direct()} {
        skip_ends(nth);
        closing = nth;
        if (!by_chunks() && pulls()) claim();
        look_ahead();
    }

    // Called by all lanes together.
    template <class Is>
    MOECOMM_FN static bool some(const Call& c, const Is& is) {
        bool found = false;
        for (i32 p = lane_id(); p < cfg.ranks; p += kWarp) found = found || is(c.shared.headers[p]);
        return __any_sync(kAllLanes, found);
    }

    MOECOMM_FN bool by_chunks() const { return cfg.domains() > 1 || gives_credit; }
    MOECOMM_FN i32 pieces() const { return whole_tokens ? kPieces : 1; }  // of an item
    // Blocks that pull: where warps claim pieces, the others may only reduce.
    MOECOMM_FN i32 pullers() const { return by_chunks() ? static_cast<i32>(gridDim.x) : min(static_cast<i32>(gridDim.x), cfg.pull_blocks); }
    MOECOMM_FN bool pulls() const { return static_cast<i32>(blockIdx.x) < pullers(); }
    // Position of the next piece: the block's n-th chunk, the token, the token's chunk.
    MOECOMM_FN i32 nth_chunk(i32 of) const { return of / kPieces >> shift; }
    MOECOMM_FN i32 token_of(i32 of) const {
        if (!by_chunks()) return of / kPieces;
        return ((blockIdx.x + gridDim.x * nth_chunk(of)) << shift) + (of / kPieces & ((1 << shift) - 1));
    }
    MOECOMM_FN i32 token() const { return token_of(nth); }
    MOECOMM_FN i32 chunk() const { return token() >> shift; }
    MOECOMM_FN bool at_end() const { return by_chunks() ? nth_chunk(nth) >= chunks_here : token() >= c.a.num_tokens; }
    // Skips tokens that the last, shorter chunk does not have.
    MOECOMM_FN void skip_ends(i32& at) const {
        while (by_chunks() && nth_chunk(at) < chunks_here && token_of(at) >= c.a.num_tokens) at += cfg.pull_warps * pieces();
    }
    // by_chunks(): advances to this warp's next item.
    MOECOMM_FN void step(i32& at) const {
        at += cfg.pull_warps * pieces();
        skip_ends(at);
    }
    // Claims the next piece or token. The first one of each warp of the grid is fixed.
    MOECOMM_FN void claim() {
        if (lane_id() == 0) claimed = pullers() * cfg.pull_warps + atomicAdd(&own_state(c.a.ctx)->next_piece, 1);
    }
    MOECOMM_FN void advance() {
        if (by_chunks()) {
            step(nth);
        } else if (pieces_per_claim > 1 && (nth + 1) % kPieces != 0) {
            ++nth;
            return;
        } else {
            nth = static_cast<i32>(__shfl_sync(kAllLanes, claimed, 0)) * pieces_per_claim;
            claim();
        }
        look_ahead();
    }
    MOECOMM_FN void look_ahead() {
        if constexpr (cfg.unsummed) return look_ahead_at_rows();
        ahead = slot_of(token(), nth_rank());
        if constexpr (cfg.domains() > 1) scaleout_sums.look_ahead(token());
        if constexpr (kSingles) {
            const bool has = token() < c.a.num_tokens && lane_id() < cfg.topk;
            owner = has ? reinterpret_cast<const i32*>(c.a.route.token_owner)[static_cast<i64>(token()) * cfg.topk + lane_id()] : -1;
        }
    }

    // Loads what is known of the token's k-th row in lane k. Its weight, which is in its owner's window, was written before the header that
    // publishes it.
    MOECOMM_FN void look_ahead_at_rows() {
        ahead = owner = -1;
        if (token() >= c.a.num_tokens || lane_id() >= cfg.topk) return;
        const i64 entry = static_cast<i64>(token()) * cfg.topk + lane_id();
        owner = reinterpret_cast<const i32*>(c.a.route.token_owner)[entry];
        ahead = reinterpret_cast<const i32*>(c.a.route.token_rows)[entry];
        if constexpr (cfg.own_weights) {
            this->next_factor = reinterpret_cast<const float*>(c.a.topk_weights)[entry];
        } else if constexpr (cfg.weighted) {
            if (owner < 0) return;
            const u64 weights = c.shared.headers[owner].combine.weights;
            this->next_factor = __uint_as_float(load_relaxed(c.transport.template peer_ptr<const u32>(owner, weights) + ahead));
        }
    }

    // True if `rank` has one row of the token. All lanes call it.
    MOECOMM_FN bool is_single(i32 rank) const {
        i32 rows = 0;
#pragma unroll
        for (i32 k = 0; k < cfg.topk; ++k) rows += __shfl_sync(kAllLanes, owner, k) == rank;
        return rows == 1;
    }

    // This lane serves the rank of that number in this domain, if there is one.
    MOECOMM_FN i32 nth_rank() const { return lane_id() - ScaleoutSums<Call>::first_lane(c); }
    MOECOMM_FN u32 inner_lanes() const { return static_cast<u32>(ScaleoutSums<Call>::kOfDomain) << ScaleoutSums<Call>::first_lane(c); }
    // Slot of token `t` at the n-th rank of this domain, -1 if none.
    MOECOMM_FN i32 slot_of(i32 t, i32 n) const {
        if (t >= c.a.num_tokens || n < 0 || n >= cfg.scaleup_ranks()) return -1;
        return reinterpret_cast<const i32*>(c.a.route.token_slot)[static_cast<i64>(t) * cfg.ranks + c.domains().first() + n];
    }

    // Returns the slot of the rank that this lane serves, -1 if none. At most topk ranks hold a token, so 32 lanes are enough. Unsummed:
    // the row that it serves, and its owner.
    MOECOMM_FN i32 slot_of_lane(i32& rank) const {
        if constexpr (cfg.unsummed) {
            rank = owner;
            return owner >= 0 ? ahead : -1;
        }
        rank = nth_rank();
        if constexpr (cfg.domains() > 1) rank += c.domains().first();
        if constexpr (cfg.scaleup_ranks() <= kWarp) return ahead;
        u64 wanted = __ballot_sync(kAllLanes, ahead >= 0);
        wanted |= static_cast<u64>(__ballot_sync(kAllLanes, slot_of(token(), kWarp + lane_id()) >= 0)) << kWarp;
        for (i32 i = 0; i < lane_id(); ++i) wanted &= wanted - 1;
        rank = __ffsll(static_cast<i64>(wanted)) - 1;
        return rank >= 0 ? slot_of(token(), rank) : -1;
    }

    // Returns whether this lane may read the row of `rank`. The lane that acquires the flag is the lane that loads the row.
    MOECOMM_FN bool await_row(i32 rank, bool may_wait) {
        if (c.reads_y(rank)) return true;
        const RoundHeader& from = c.shared.headers[rank];
        if ((from.combine.rows != 0 && from.combine.is_reduced == 0) || seen == chunk()) return true;
        const u64 flag = c.reduced_flag(c.me(), rank, chunk());
        u64 tag = 0;
        const auto counts = [&] { return blockIdx.x == 0 && warp == 0; };
        if (may_wait ? !wait_flag(c.round, Phase::reduced, rank, flag, tag, Counter::wait_combine, counts)
                     : signal_tag(load_acquire(own<const u64>(c.a.ctx, flag))) != c.round.tag)
            return false;
        fence_async();  // reads of the row come after the flag
        if (cfg.scaleup_ranks() <= kWarp) seen = chunk();
        return true;
    }

    MOECOMM_FN const u8* row_at(i32 rank, i32 slot) const {
        if (c.reads_y(rank)) return reinterpret_cast<const u8*>(c.a.y) + slot * static_cast<i64>(c.a.y_stride);
        const RoundHeader& from = c.shared.headers[rank];
        if (from.combine.rows == 0) return c.staged_row(rank, c.me(), token());
        return c.transport.template peer_ptr<u8>(rank, from.combine.rows) + slot * static_cast<i64>(from.combine.pitch);
    }

    // See gather.cuh. Sets `failed` if a wait failed.
    MOECOMM_FN Next open(const u8*& source, Item& out, bool may_wait) {
        if (may_wait && gives_credit) signal_pulled(min(nth_chunk(nth), chunks_here));  // chunks in which it has no piece
        if (failed || at_end()) return Next::none;
        i32 rank;
        const i32 slot = slot_of_lane(rank);
        bool missing = slot >= 0 && !await_row(rank, may_wait);
        if constexpr (cfg.domains() > 1) missing = !scaleout_sums.await(chunk(), may_wait) || missing;
        if (__any_sync(kAllLanes, missing)) {
            failed = may_wait;
            return may_wait ? Next::none : Next::later;
        }
        const i32 column = nth % kPieces * kPieceColumns;
        bool single = false;
        if constexpr (kSingles) single = is_single(rank);
        if (slot >= 0) {
            const u8* const row = row_at(rank, slot);
            if constexpr (cfg.casts()) {
                source = row + scaled_column_at(column);
            } else {
                source = row + column * bytes_of(single ? cfg.type : kType);
            }
            if constexpr (kSingles) weight = single ? row + cfg.row_bytes() : nullptr;
            if constexpr (kFactors) this->factor = this->next_factor;
            if constexpr (kHashes) hash = c.added_hash(token(), rank);
        } else if constexpr (kSumsInRing) {
            if (const u8* const sum = scaleout_sums.row_of_lane(token())) {
                source = sum + (cfg.casts() ? scaled_column_at(column) : column * bytes_of(kType));
            }
            if constexpr (kHashes) hash = c.added_hash(token(), scaleout_sums.hash_word_of_lane());
        }
        if (column == 0 && c.a.out_weight_grads != 0) load_grads();
        if constexpr (kHashes && cfg.domains() > 1) {
            if (column == 0) scaleout_sums.take_told(token());
        }
        out = {0, column, token(), 0, -1, 0};
        advance();
        return Next::item;
    }

    // Copies the token's gradients of weights, one in each lane, from the owner of its expert. Another lane acquired that owner's flag;
    // __syncwarp passes this on.
    MOECOMM_FN void load_grads() const {
        __syncwarp();
        if (lane_id() >= cfg.topk) return;
        const i64 entry = static_cast<i64>(token()) * cfg.topk + lane_id();
        if constexpr (cfg.sum_grads) {
            reinterpret_cast<float*>(c.a.out_weight_grads)[entry] = summed_grad();
        } else {
            const i32 owner = reinterpret_cast<const i32*>(c.a.route.token_owner)[entry];
            u32 grad = 0;
            if (owner >= 0) grad = load_relaxed(reinterpret_cast<const u32*>(c.grads_of(owner, token())) + lane_id());
            reinterpret_cast<u32*>(c.a.out_weight_grads)[entry] = grad;
        }
    }

    // Returns the sum of a gradient over all ranks with a row of the token, in rank order. A forwarder returns one sum for its domain.
    MOECOMM_FN float summed_grad() const {
        const auto* slots = reinterpret_cast<const i32*>(c.a.route.token_slot) + static_cast<i64>(token()) * cfg.ranks;
        float sum = 0.0f;
#pragma unroll 1
        for (i32 rank = 0; rank < cfg.ranks; ++rank) {
            if (slots[rank] < 0) continue;
            sum = __fadd_rn(sum, __uint_as_float(load_relaxed(reinterpret_cast<const u32*>(c.grads_of(rank, token())) + lane_id())));
            if (cfg.domains() > 1 && !c.domains().reaches(rank) && !c.direct())
                rank = (rank / cfg.scaleup_ranks() + 1) * cfg.scaleup_ranks() - 1;
        }
        return sum;
    }

    MOECOMM_FN OutputRow target(const Item& item) const { return c.out_of(item.token); }
    template <i32 n>
    MOECOMM_FN void start(const OutputRow& out, i32 column, float (&sum)[n]) const {
        c.load_bias(out, column, sum);
    }
    template <i32 n>
    MOECOMM_FN void store(const OutputRow& out, i32 column, float (&sum)[n]) const {
        c.store_out(out, column, sum);
    }
    MOECOMM_FN void keep_owners(i32 place) const { scaleout_sums.keep_owners(place); }
    template <i32 n>
    MOECOMM_FN void add_domains(i32 place, const OutputRow& out, i32 column, float (&sum)[n]) const {
        scaleout_sums.add_to(place, out.token, column, sum);
    }

    // Gives credits at once: a warp that always has a piece to pull would otherwise keep them, and its peers would wait.
    MOECOMM_FN void close(const Item&) {
        if (!gives_credit) return;
        step(closing);
        signal_pulled(min(nth_chunk(closing), chunks_here));
    }

    // Arrives at the steps of the block's first `chunks` chunks, of which this warp has nothing left to read. The last warp to arrive gives
    // the credits (release); with several domains, the flag warp does (scaleout_flags.cuh).
    MOECOMM_FN void signal_pulled(i32 chunks) {
        for (; signaled < chunks; ++signaled) {
            if constexpr (cfg.domains() > 1) {
                __syncwarp();  // all lanes have read
                if (lane_id() == 0) c.shared.pulled.arrive(c.round, signaled);
                continue;
            }
            const i32 chunk = blockIdx.x + gridDim.x * signaled;
            if (!complete_step(c.shared.pulled, c.round, signaled) || !await_earlier_credit(c, c.me(), chunk, c.a.chunk_tokens)) continue;
            const u64 place = credit_at(c.window(), c.shape(), c.me(), chunk, c.a.chunk_tokens);
            for (i32 step = lane_id(); step < cfg.scaleup_ranks() - 1; step += kWarp)
                c.transport.signal(c.domains().neighbor(step), place, word_signal(c.round.tag, chunk));
            __syncwarp();  // own credit last: a warp that sees it may give this place's next credit, which must not overtake these
            if (lane_id() == 0) c.transport.signal(c.me(), place, word_signal(c.round.tag, chunk));
        }
    }
};

// Called by each pull warp. Pulls or collects the rows of this rank's tokens. Returns false if a wait failed; the failure record is filled.
template <class Call>
MOECOMM_FN bool pull(const Call& c) {
    const i32 warp = warp_id() - Call::cfg.reduce_warps;
    if constexpr (Call::cfg.packets) {
        Collect<Call> role(c, warp);
        if (!await_all_headers(c)) return false;  // packets may arrive before a header that makes the round invalid
        return c.shared.is_invalid != 0 || role.run();
    } else {
        if (!await_all_headers(c)) return false;
        if (c.shared.is_invalid != 0) return true;
        Pull<Call> role(c, warp);
        if (!role.pulls()) return true;
        using Ring = typename CombineShared<Call::cfg>::PullRing;
        if constexpr (Call::cfg.domains() > 1) {
            GatherRows<Ring, Pull<Call>>(c.shared.pull[warp], role).run();
        } else {
            Gather<Ring, Pull<Call>>{c.shared.pull[warp], role}.run();
        }
        return !role.failed;
    }
}

}  // namespace moecomm
