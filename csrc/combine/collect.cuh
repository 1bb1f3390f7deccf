// Step 3 at a source rank with few tokens: polls for packets and adds them in rank order.
#pragma once
#include "push.cuh"

namespace moecomm {

// The role of a pull warp. The pull warps of the grid divide the pieces of all tokens. All lanes call all methods together.
template <class Call>
struct Collect {
    static constexpr CombineConfig cfg = Call::cfg;
    static constexpr Type kType = cfg.staged();
    static constexpr bool kSingles = cfg.single_rows_travel();
    using P = Packing<cfg>;
    static constexpr bool kAllInOneBatch = cfg.ranks <= 4;  // registers hold all packets of a piece; else kBatch, next to the sums
    static constexpr i32 kBatch = kAllInOneBatch ? cfg.ranks : cfg.ranks <= kWarp ? 2 : 1;  // packets that are loaded at once
    static constexpr i32 kPeers = ceil_div(cfg.ranks, kWarp);                               // that a lane looks up in the route

    const Call& c;
    const i32 items;
    // Polls of complete packets before the warp polls their tags alone. Polling complete packets finds them one load earlier, but delays
    // the loads of the multiprocessor's other warps, so it pays only where few warps do it.
    const i32 looks;
    i32 nth;
    i32 ahead[kPeers];           // this lane's slots of the next token
    i32 owner = -1;              // single rows: the owner of its k-th expert, in lane k
    Waited waited = Waited::ok;  // how this lane's wait ended, for which rank, and the last tag it saw
    i32 missing_peer = 0;
    u32 seen = 0;

    MOECOMM_FN Collect(const Call& call, i32 warp)
        : c(call),
          items(call.a.num_tokens * P::kPieces),
          looks(items <= static_cast<i32>(gridDim.x) ? kPacketPolls : 1),
          nth(blockIdx.x + gridDim.x * warp) {
        look_ahead();
    }

    MOECOMM_FN void look_ahead() {
#pragma unroll
        for (i32 i = 0; i < kPeers; ++i) {
            const i32 rank = i * kWarp + lane_id();
            ahead[i] = -1;
            if (nth < items && rank < cfg.ranks)
                ahead[i] = reinterpret_cast<const i32*>(c.a.route.token_slot)[static_cast<i64>(nth / P::kPieces) * cfg.ranks + rank];
        }
        if constexpr (kSingles) {
            const bool has = nth < items && lane_id() < cfg.topk;
            const i64 entry = static_cast<i64>(nth / P::kPieces) * cfg.topk + lane_id();
            owner = has ? reinterpret_cast<const i32*>(c.a.route.token_owner)[entry] : -1;
        }
    }
    // Returns one bit for each rank that has one row of the next token.
    MOECOMM_FN u64 singles() const {
        u64 all = 0;
        if constexpr (kSingles) {
            i32 rows[kPeers] = {};
#pragma unroll
            for (i32 k = 0; k < cfg.topk; ++k) {
                const i32 rank = __shfl_sync(kAllLanes, owner, k);
#pragma unroll
                for (i32 i = 0; i < kPeers; ++i) rows[i] += rank == i * kWarp + lane_id();
            }
#pragma unroll
            for (i32 i = 0; i < kPeers; ++i) all |= static_cast<u64>(__ballot_sync(kAllLanes, rows[i] == 1)) << i * kWarp;
        }
        return all;
    }
    // Returns one bit for each rank that holds a part of the next token.
    MOECOMM_FN u64 owners() const {
        u64 all = 0;
#pragma unroll
        for (i32 i = 0; i < kPeers; ++i) all |= static_cast<u64>(__ballot_sync(kAllLanes, ahead[i] >= 0)) << i * kWarp;
        return all;
    }

    // True if a packet has this lane's line of a step.
    MOECOMM_FN static bool has_line(i32 step, i32 piece, bool single) {
        if (kSingles && single) return step < P::kSingleSteps && P::is_single_line(packet_line(step));
        return packet_line(step) < P::lines(piece);
    }
    // Loads all packets in `missing` at once, and clears the bits of those that are complete: each line carries the round's tag. `single`:
    // one bit for each packet of a single row.
    MOECOMM_FN void look(const u8* const (&packets)[kBatch], PacketWords (&words)[kBatch], u32& missing, i32 piece, u32 single) const {
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i) {
            if ((missing >> i & 1) == 0) continue;
#pragma unroll
            for (i32 step = 0; step < P::kSteps; ++step)
                if (has_line(step, piece, (single >> i & 1) != 0))
                    words[i].step[step] = load_line_words(packets[i] + step * kWarp * 16 + lane_id() * 16);
        }
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i) {
            if ((missing >> i & 1) == 0) continue;
            bool here = true;
#pragma unroll
            for (i32 step = 0; step < P::kSteps; ++step)
                if (ends_line() && has_line(step, piece, (single >> i & 1) != 0)) here = here && is_tag(words[i].step[step].y);
            if (__all_sync(kAllLanes, here)) missing &= ~(1u << i);
        }
    }

    MOECOMM_FN bool is_tag(u64 word) const { return kSingles ? signal_tag(word) == c.round.tag : word == line_tag(c.round.tag); }

    // True in the thread of the rank that counts its waits for packets (counters.h).
    MOECOMM_FN static bool counts_waits() { return blockIdx.x == 0 && static_cast<i32>(threadIdx.x) == cfg.reduce_warps * kWarp; }
    // Waits until each line of each packet has its tag, one line in each lane. This orders nothing: the packets must be loaded again.
    // Returns false in all lanes if a tag did not come; report() then fills the failure record.
    MOECOMM_FN bool await_tags(u64 owners, u64 singles, i32 token, i32 piece) {
        for (; owners != 0 && waited == Waited::ok; owners &= owners - 1) {
            const bool single = kSingles && (singles & owners & (~owners + 1)) != 0;
            if (single ? !P::is_single_line(lane_id()) : lane_id() >= P::lines(piece)) continue;
            missing_peer = __ffsll(static_cast<i64>(owners)) - 1;
            const auto* tag = own<const u64>(c.a.ctx, c.packet_at(missing_peer, token, piece) + (lane_id() + 1) * kLineBytes - sizeof(u64));
            if (counts_waits()) c.shared.wait_begun = now_ns();
            waited = wait_until(deadline_of(c.a.ctx), [&] {
                seen = signal_tag(load_relaxed(tag));
                return seen == c.round.tag;
            });
            if (counts_waits() && missing_peer != c.me())
                add_counter(c.a.ctx, Counter::wait_combine, missing_peer, now_ns() - c.shared.wait_begun);
        }
        return __all_sync(kAllLanes, waited == Waited::ok);
    }
    // Fills the failure record if this lane's wait failed. Called when no packet is held, because the call would have to save its
    // registers.
    MOECOMM_FN void report() const {
        if (waited == Waited::ok) return;
        report_failure(c.round, waited, Phase::reduced, missing_peer, c.round.tag, seen,
                       waited == Waited::timeout ? c.a.ctx.timeout_ns : 0);
    }

    // Loads the packets of `owners`, at most kBatch. Returns false in all lanes if one did not arrive.
    MOECOMM_FN bool load_packets(u64 owners, u64 singles, i32 token, i32 piece, PacketWords (&words)[kBatch], u32& single) {
        const u8* packets[kBatch];
        u32 all = 0;
        u64 left = owners;
        single = 0;
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i) {
            packets[i] = own<const u8>(c.a.ctx, c.packet_at(max(__ffsll(static_cast<i64>(left)), 1) - 1, token, piece));
            if (left != 0) all |= 1u << i;
            if (kSingles && (singles & left & (~left + 1)) != 0) single |= 1u << i;
            left &= left - 1;
        }
        u32 missing = all;
        for (i32 times = 1;; ++times) {
            look(packets, words, missing, piece, single);
            if (missing == 0) return true;
            if (times < looks) continue;
            if (!await_tags(owners, singles, token, piece)) return false;
            missing = all;
        }
    }

    // Removes the first kBatch ranks from `owners` and returns them.
    MOECOMM_FN static u64 take(u64& owners) {
        const u64 all = owners;
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i) owners &= owners - 1;
        return all & ~owners;
    }

    // Adds the packets of `owners` for a piece in float32 and in rank order, and stores the sum. Returns false in all lanes if a packet did
    // not arrive.
    MOECOMM_FN bool collect(u64 owners, u64 singles, i32 token, i32 piece) {
        float sum[P::kSteps][2][P::kColumns] = {};
        if constexpr (cfg.bias_first && !kAllInOneBatch) {
#pragma unroll
            for (i32 step = 0; step < P::kSteps; ++step) start(token, piece, step, sum[step]);
        }
        do {
            const u64 now = take(owners);
            const i32 count = __popcll(now);
            PacketWords words[kBatch];
            u32 single;
            if (!load_packets(now, singles, token, piece, words, single)) return false;
            float scale[kBatch];
            if constexpr (cfg.casts()) {
#pragma unroll
                for (i32 i = 0; i < kBatch; ++i)
                    if (i < count) scale[i] = scale_of_lane(words[i], piece);
            }
#pragma unroll
            for (i32 step = 0; step < P::kSteps; ++step) {
                if constexpr (cfg.bias_first && kAllInOneBatch) start(token, piece, step, sum[step]);  // packets fill the registers
#pragma unroll
                for (i32 i = 0; i < kBatch; ++i) {
                    if (i >= count) continue;
                    if (kSingles && (single >> i & 1) != 0) {
                        add_single(words[i], step, sum[step]);
                    } else if constexpr (cfg.casts()) {
                        add_scaled(words[i].step[step], step, scale[i], sum[step]);
                    } else {
                        add(words[i].step[step], sum[step]);
                    }
                }
                if constexpr (kAllInOneBatch) store(token, piece, step, sum[step]);
            }
        } while (!kAllInOneBatch && owners != 0);
        if constexpr (!kAllInOneBatch) {
#pragma unroll
            for (i32 step = 0; step < P::kSteps; ++step) store(token, piece, step, sum[step]);
        }
        return true;
    }

    MOECOMM_FN static void add_single(const PacketWords& words, i32 step, float (&sum)[2][P::kColumns]) {
        if constexpr (kSingles) {
            const float weight = __uint_as_float(__shfl_sync(kAllLanes, signal_word(words.step[0].y), kLineLanes - 1));
#pragma unroll
            for (i32 i = 0; i < 2; ++i) {
                float columns[P::kColumns];
                widen_word<cfg.type>(P::single_columns(words, step, i), columns);
#pragma unroll
                for (i32 k = 0; k < P::kColumns; ++k) sum[i][k] = __fadd_rn(sum[i][k], __fmul_rn(weight, columns[k]));
            }
        }
    }

    // Rows with scales: the scale of this lane's group of a packet: lane g has that of the g-th.
    MOECOMM_FN static float scale_of_lane(const PacketWords& words, i32 piece) {
        if constexpr (P::kLastBytes != cfg.packet_row_bytes) {
            if (piece == P::kPieces - 1) return scale_behind<P::kLastBytes>(words);
        }
        return scale_behind<cfg.packet_row_bytes>(words);
    }
    template <i32 bytes>
    MOECOMM_FN static float scale_behind(const PacketWords& words) {
        constexpr i32 first = bytes / P::kWord, groups = ceil_div(bytes, kQuantGroup);
        constexpr i32 step = step_of(first);
        static_assert(step == step_of(first + (groups - 1) / 2), "all scales are in one step");
        const i32 group = min(lane_id(), groups - 1), word = first + group / 2, lane = lane_of(word);
        const u64 x = __shfl_sync(kAllLanes, words.step[step].x, lane), y = __shfl_sync(kAllLanes, words.step[step].y, lane);
        const u64 both = word % kLineWords % 2 != 0 ? y : x;
        return __uint_as_float(static_cast<u32>(group % 2 != 0 ? both >> 32 : both));
    }
    // Rows with scales: adds this lane's words of a step; `scale`: of scale_of_lane.
    MOECOMM_FN static void add_scaled(const ulonglong2& words, i32 step, float scale, float (&sum)[2][P::kColumns]) {
        const u64 both[2] = {words.x, words.y};
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            const i32 group = (packet_word(step) + i) * P::kColumns / kQuantGroup;
            const float factor = __shfl_sync(kAllLanes, scale, min(group, kWarp - 1));
            float columns[P::kColumns];
            widen_word<kType>(static_cast<u32>(both[i]), columns);
            widen_word<kType>(static_cast<u32>(both[i] >> 32), columns + P::kColumns / 2);
#pragma unroll
            for (i32 k = 0; k < P::kColumns; ++k) sum[i][k] = __fadd_rn(sum[i][k], __fmul_rn(columns[k], factor));
        }
    }

    MOECOMM_FN static void add(const ulonglong2& words, float (&sum)[2][P::kColumns]) {
        const u64 both[2] = {words.x, words.y};
#pragma unroll
        for (i32 i = 0; i < 2; ++i) {
            float columns[P::kColumns];
            widen_word<kType>(static_cast<u32>(both[i]), columns);
            widen_word<kType>(static_cast<u32>(both[i] >> 32), columns + P::kColumns / 2);
#pragma unroll
            for (i32 k = 0; k < P::kColumns; ++k) sum[i][k] = __fadd_rn(sum[i][k], columns[k]);
        }
    }

    // bias_first: sets this lane's columns of a step to the bias.
    MOECOMM_FN void start(i32 token, i32 piece, i32 step, float (&sum)[2][P::kColumns]) const {
        const OutputRow out = c.out_of(token);
        const i32 words = P::words(piece);
#pragma unroll
        for (i32 i = 0; i < 2; ++i)
            if (P::has(step, i, words)) c.load_bias(out, P::column(piece) + (packet_word(step) + i) * P::kColumns, sum[i]);
    }

    MOECOMM_FN void store(i32 token, i32 piece, i32 step, float (&sum)[2][P::kColumns]) const {
        const i32 words = P::words(piece);
#pragma unroll
        for (i32 i = 0; i < 2; ++i)
            if (P::has(step, i, words)) c.store_out(token, P::column(piece) + (packet_word(step) + i) * P::kColumns, sum[i]);
    }

    // Runs the role. Returns false in all lanes if a packet did not arrive; the failure record is filled.
    MOECOMM_FN bool run() {
        while (nth < items) {
            const u64 from = owners(), alone = singles();
            const i32 token = nth / P::kPieces, piece = nth % P::kPieces;
            nth += gridDim.x * cfg.pull_warps;
            look_ahead();
            if (!collect(from, alone, token, piece)) break;
        }
        report();
        return __all_sync(kAllLanes, waited == Waited::ok);
    }
};

}  // namespace moecomm
