// Step 2 for source ranks with few tokens: reduced rows are computed in registers and pushed in packets (csrc/protocol/packets.h), piece by
// piece. The place of a packet depends only on the round's parity, this rank, the token and the piece, so nothing has to be awaited. A
// combine of 128 tokens takes 22.5 us (bench/results/ll-h200-4.json); before packets, when rows were pulled, it took 26.6 us.
#pragma once
#include "../device/packet.cuh"
#include "weights.cuh"

namespace moecomm {

// Layout of a staged row in packets.
template <CombineConfig cfg>
struct Packing {
    static constexpr i32 kWord = sizeof(u64), kPieces = cfg.packets_of_row();
    static constexpr i32 kSteps = ceil_div(cfg.packet_lines, kStepLines);
    static constexpr i32 kColumns = kWord / bytes_of(cfg.staged());  // columns in a word

    // First column and number of words of a piece; the last piece may have fewer words.
    MOECOMM_FN static i32 column(i32 piece) { return piece * (cfg.packet_row_bytes / bytes_of(cfg.staged())); }
    MOECOMM_FN static i32 words(i32 piece) { return min(cfg.packet_row_bytes, cfg.value_bytes() - piece * cfg.packet_row_bytes) / kWord; }
    // Lines of a packet. The last one ends with its words and, of cast rows, their scales. Of float32 sums it would save one line of a
    // hundred or two, and kernels have no register left for it.
    static constexpr i32 kLastBytes = cfg.value_bytes() - (kPieces - 1) * cfg.packet_row_bytes;
    static constexpr i32 kLastScales = cfg.casts() ? ceil_div(ceil_div(kLastBytes, kQuantGroup), 2) : 0;  // words
    static constexpr i32 kLastLines =
        cfg.staged() == Type::fp32 ? cfg.packet_lines : ceil_div(kLastBytes / kWord + kLastScales, kLineWords);
    MOECOMM_FN static i32 lines(i32 piece) { return piece == kPieces - 1 ? kLastLines : cfg.packet_lines; }
    MOECOMM_FN static i32 scale_word(i32 piece) { return (piece == kPieces - 1 ? kLastBytes : cfg.packet_row_bytes) / kWord; }
    // A single row (CombineConfig::single_rows_travel) takes half as many steps. A lane holds in one of them what it would hold of the sum
    // in two: first in the first word, then in the second; the lane that ends a line, in the halves of its only word. Each line's tag
    // carries the weight.
    static constexpr i32 kSingleSteps = ceil_div(kSteps, 2);
    MOECOMM_FN static bool is_single_line(i32 line) { return line / kStepLines * 2 * kStepLines + line % kStepLines < cfg.packet_lines; }
    // Columns of a single row that become the nth word of a step of the sum, in two places of 16 bits.
    MOECOMM_FN static u32 single_columns(const PacketWords& words, i32 step, i32 nth) {
        const ulonglong2& held = words.step[step / 2];
        const u64 word = step % 2 != 0 && !ends_line() ? held.y : held.x;
        return static_cast<u32>((ends_line() ? step % 2 : nth) != 0 ? word >> 32 : word);
    }
    // True if the nth of this lane's two words in a step is among the first `words`.
    MOECOMM_FN static bool has(i32 step, i32 nth, i32 words) { return packet_word(step) + nth < words && !(nth == 1 && ends_line()); }
};

// Called by one thread for each source rank, before a __syncthreads. Reads from the route what the rank sent and its flat rows here.
// Returns whether its rows travel in packets. The index of its last chunk is usually that of this rank, so that range is loaded
// speculatively.
template <class Call>
MOECOMM_FN bool look_up_source_rank(const Call& c, i32 source_rank) {
    const auto* ranges = reinterpret_cast<const u32*>(c.a.route.ranges) + static_cast<i64>(source_rank) * c.shape().max_tokens;
    const i32 guess = max(c.chunks() - 1, 0);
    SourceTokens sent = reinterpret_cast<const SourceTokens*>(c.a.route.sent)[source_rank];
    const bool intact = is_sealed_by_kernel(c.a.route, Call::cfg.ranks);
    const u32 first = ranges[0];
    u32 last = ranges[guess];
    if (!intact) sent = {0, 1};
    c.shared.sent[source_rank] = sent;
    c.shared.pushed[source_rank] = {0, 0};
    if (!c.in_packets(source_rank)) return false;
    if (sent.num_tokens == 0) return true;
    const i32 end = count_chunks(sent.num_tokens, sent.chunk_tokens) - 1;
    if (end != guess) last = ranges[end];
    c.shared.pushed[source_rank] = {signal_first(first), signal_first(last) + signal_count(last) - signal_first(first)};
    return true;
}

// The role of a warp that pushes. The warps of the grid divide the pieces of the rows of all such source ranks, which alternate. All lanes
// call all methods together.
template <class Call>
struct Push {
    static constexpr CombineConfig cfg = Call::cfg;
    using P = Packing<cfg>;
    static constexpr bool kFlat = cfg.layout == Layout::flat, kCopies = kFlat && !cfg.casts(), kWeighted = cfg.weighted && !kFlat;
    static constexpr i32 kWarps = cfg.reduce_warps > 0 ? cfg.reduce_warps : cfg.pull_warps;
    static constexpr i32 kHeldBytes = P::kColumns * bytes_of(cfg.type);  // bytes of a row of y that become one word
    static constexpr i32 kHeldWords = kHeldBytes / 4;
    // Rows that are loaded at once, into 32 registers; cast rows into 16 where most rows do not travel in packets.
    static constexpr i32 kBatch = cfg.casts() && kHeldBytes == 16 && cfg.packets ? 2 : kHeldBytes > 16 ? 1 : 16 / kHeldBytes;

    // An item whose loads are in flight.
    struct PendingItem {
        i32 source_rank;  // -1: no item
        i32 flat_row, piece;
        i32 token;          // flat layout
        PacketWords words;  // flat layout
        i32 entry;          // other layouts: the row of this lane's k, -1 if none
    };

    const Call& c;
    const i32 items;
    i32 nth;
    Waited waited = Waited::ok;  // how this lane's wait for a weight of missing_peer ended
    i32 missing_peer = 0;

    MOECOMM_FN explicit Push(const Call& call)
        : c(call), items(most_rows(call) * cfg.ranks * P::kPieces), nth(blockIdx.x + gridDim.x * warp_id()) {}

    MOECOMM_FN static i32 most_rows(const Call& c) {
        i32 most = 0;
        for (i32 p = 0; p < cfg.ranks; ++p) most = max(most, c.shared.pushed[p].count);
        return most;
    }

    MOECOMM_FN void begin(PendingItem& f) {
        for (f.source_rank = -1; nth < items && f.source_rank < 0; nth += gridDim.x * kWarps) {
            const i32 source_rank = rotated<cfg.ranks>(c.me(), nth / P::kPieces % cfg.ranks), row = nth / P::kPieces / cfg.ranks;
            const RowRange rows = c.shared.pushed[source_rank];
            if (row >= rows.count) continue;
            f.source_rank = source_rank;
            f.piece = nth % P::kPieces;
            f.flat_row = rows.first + row;
        }
        if (f.source_rank >= 0) load(f);
    }

    MOECOMM_FN void load(PendingItem& f) const {
        if constexpr (kCopies) {
            f.token = reinterpret_cast<const int2*>(c.a.route.src)[f.flat_row].y;
            const auto* row = reinterpret_cast<const u64*>(y_row(f.flat_row) + f.piece * cfg.packet_row_bytes);
            const i32 words = P::words(f.piece);
#pragma unroll
            for (i32 step = 0; step < P::kSteps; ++step) {
                u64 held[2] = {0, 0};
#pragma unroll
                for (i32 i = 0; i < 2; ++i)
                    if (P::has(step, i, words)) held[i] = row[packet_word(step) + i];
                f.words.step[step] = make_ulonglong2(held[0], held[1]);
            }
        } else if constexpr (kFlat) {
            f.entry = lane_id() == 0 ? f.flat_row : -1;
        } else {
            f.entry = -1;
            if (lane_id() < cfg.topk)
                f.entry = reinterpret_cast<const i32*>(c.a.route.rows)[static_cast<i64>(f.flat_row) * cfg.topk + lane_id()];
        }
    }

    MOECOMM_FN const u8* y_row(i32 row) const { return reinterpret_cast<const u8*>(c.a.y) + row * c.a.y_stride; }
    MOECOMM_FN u8* packet(const PendingItem& f, i32 token) const {
        return c.transport.template peer_ptr<u8>(f.source_rank, c.packet_at(c.me(), token, f.piece));
    }

    // Stores the item's packet at the source rank; reduces its rows first unless the layout is flat. Returns false in all lanes if a weight
    // did not arrive; report() then fills the failure record.
    MOECOMM_FN bool finish(const PendingItem& f) {
        if constexpr (cfg.casts()) {
            return reduce_and_cast(f);
        } else if constexpr (kCopies) {
            u8* const to = packet(f, f.token);
#pragma unroll
            for (i32 step = 0; step < P::kSteps; ++step) store_step(to, P::lines(f.piece), step, f.words.step[step], c.round.tag);
            return true;
        } else {
            return reduce(f);
        }
    }

    // Called while the rows of an item are in flight. Waits for this lane's weight unless `word` holds it. Returns false in all lanes if a
    // weight did not arrive.
    MOECOMM_FN bool await_weight(const PendingItem& f, i32 token, u64& word) {
        if (f.entry >= 0 && signal_tag(word) != c.round.tag) {
            missing_peer = f.source_rank;
            waited = wait_until(deadline_of(c.a.ctx), [&] { return is_weight_here(c, f.source_rank, token, word); });
        }
        return __all_sync(kAllLanes, waited == Waited::ok);
    }
    // Fills the failure record if this lane's wait failed. Called when no row is held, as in Collect.
    MOECOMM_FN bool report() const {
        if (waited != Waited::ok)
            report_failure(c.round, waited, Phase::header, missing_peer, c.round.tag, 0,
                           waited == Waited::timeout ? c.a.ctx.timeout_ns : 0);
        return __all_sync(kAllLanes, waited == Waited::ok);
    }

    // Reduces the rows of an item in float32 and in the order of k, multiply then add, each rounded, and stores the packet.
    MOECOMM_FN bool reduce(const PendingItem& f) {
        u32 named = __ballot_sync(kAllLanes, f.entry >= 0);
        const i32 token = reinterpret_cast<const int2*>(c.a.route.src)[__shfl_sync(kAllLanes, f.entry, __ffs(named) - 1)].y;
        float weight = 0.0f;
        u64 word = 0;
        if constexpr (kWeighted && !cfg.own_weights) {
            if (f.entry >= 0) weight = reinterpret_cast<const float*>(c.a.route.row_weights)[f.entry];
        }
        if constexpr (cfg.single_rows_travel()) {
            if ((named & (named - 1)) == 0) return send_single(f, token, __ffs(named) - 1, weight);
        }
        float sum[P::kSteps][2][P::kColumns] = {};
        while (named != 0) {
            u32 held[kBatch][P::kSteps][2][kHeldWords];
            u32 left = named;
#pragma unroll
            for (i32 i = 0; i < kBatch; ++i) {
                if (left != 0) load_row(f, __shfl_sync(kAllLanes, f.entry, __ffs(left) - 1), held[i]);
                left &= left - 1;
            }
            if constexpr (cfg.own_weights) {
                if (!await_weight(f, token, word)) return false;
                weight = weight_in(word);
            }
#pragma unroll
            for (i32 i = 0; i < kBatch; ++i) {
                if (named != 0) add(held[i], __shfl_sync(kAllLanes, weight, __ffs(named) - 1), sum);
                named &= named - 1;
            }
        }
        u8* const to = packet(f, token);
#pragma unroll
        for (i32 step = 0; step < P::kSteps; ++step)
            store_step(to, P::lines(f.piece), step, make_ulonglong2(narrow(sum[step][0]), narrow(sum[step][1])), c.round.tag);
        return true;
    }

    // As reduce; casts the sums by groups of columns, through shared memory to the lanes that store them. A lane adds up every 32nd vector
    // of 8 columns.
    MOECOMM_FN bool reduce_and_cast(const PendingItem& f) {
        constexpr i32 vectors = ceil_div(cfg.packet_row_bytes, 8 * kWarp);
        u32 named = __ballot_sync(kAllLanes, f.entry >= 0);
        const i32 token = reinterpret_cast<const int2*>(c.a.route.src)[__shfl_sync(kAllLanes, f.entry, __ffs(named) - 1)].y;
        const i32 words = P::words(f.piece);  // of 8 columns, too
        float weight = 0.0f;
        u64 word = 0;
        if constexpr (kWeighted && !cfg.own_weights) {
            if (f.entry >= 0) weight = reinterpret_cast<const float*>(c.a.route.row_weights)[f.entry];
        }
        float sum[vectors][8] = {};
        while (named != 0) {
            u32 held[kBatch][vectors][kHeldWords];
            u32 left = named;
#pragma unroll
            for (i32 i = 0; i < kBatch; ++i) {
                if (left == 0) continue;
                const u8* const piece = y_row(__shfl_sync(kAllLanes, f.entry, __ffs(left) - 1)) + P::column(f.piece) * bytes_of(cfg.type);
                left &= left - 1;
#pragma unroll
                for (i32 v = 0; v < vectors; ++v) load_vector_of_8(piece, v * kWarp + lane_id(), words, held[i][v]);
            }
            if constexpr (cfg.own_weights) {
                if (!await_weight(f, token, word)) return false;
                weight = weight_in(word);
            }
#pragma unroll
            for (i32 i = 0; i < kBatch; ++i) {
                if (named == 0) continue;
                const float factor = __shfl_sync(kAllLanes, weight, __ffs(named) - 1);
                named &= named - 1;
#pragma unroll
                for (i32 v = 0; v < vectors; ++v) add_vector(held[i][v], factor, sum[v]);
            }
        }
        u64* const content = c.shared.content[warp_id()];
        auto* const scales = reinterpret_cast<u32*>(content + P::scale_word(f.piece));
        u32 cast[vectors][2], scale[vectors];
        quantize_registers<cfg.wire>(sum, cast, scale);
#pragma unroll
        for (i32 v = 0; v < vectors; ++v) {
            const i32 vector = v * kWarp + lane_id();
            if (vector >= words) continue;
            content[vector] = static_cast<u64>(cast[v][1]) << 32 | cast[v][0];
            if (vector % (kQuantGroup / 8) == 0) scales[vector / (kQuantGroup / 8)] = scale[v];
        }
        __syncwarp();
        u8* const to = packet(f, token);
#pragma unroll
        for (i32 step = 0; step < P::kSteps; ++step) {
            const u64* const two = content + packet_word(step);
            store_step(to, P::lines(f.piece), step, make_ulonglong2(two[0], two[1]), c.round.tag);
        }
        __syncwarp();  // `content` may be overwritten
        return true;
    }
    MOECOMM_FN static void load_vector_of_8(const u8* piece, i32 vector, i32 vectors, u32 (&held)[kHeldWords]) {
#pragma unroll
        for (i32 i = 0; i < kHeldWords; i += 4) {
            uint4 words = make_uint4(0, 0, 0, 0);
            if (vector < vectors) words = *reinterpret_cast<const uint4*>(piece + vector * kHeldBytes + i * 4);
            held[i] = words.x, held[i + 1] = words.y, held[i + 2] = words.z, held[i + 3] = words.w;
        }
    }
    MOECOMM_FN static void add_vector(const u32 (&held)[kHeldWords], float weight, float (&sum)[8]) {
        float columns[8];
#pragma unroll
        for (i32 i = 0; i < kHeldWords; ++i) widen_word<cfg.type>(held[i], columns + i * (8 / kHeldWords));
#pragma unroll
        for (i32 i = 0; i < 8; ++i)  // a flat row keeps the sign of its zeros
            sum[i] = kFlat ? columns[i] : __fadd_rn(sum[i], kWeighted ? __fmul_rn(weight, columns[i]) : columns[i]);
    }

    // Stores a piece of the only row that this rank has of the token; `lane` has its entry and weight.
    MOECOMM_FN bool send_single(const PendingItem& f, i32 token, i32 lane, float weight) {
        u32 held[P::kSteps][2][kHeldWords];
        load_row(f, __shfl_sync(kAllLanes, f.entry, lane), held);
        if constexpr (cfg.own_weights) {
            u64 word = 0;
            if (!await_weight(f, token, word)) return false;
            weight = weight_in(word);
        }
        const u32 bits = __float_as_uint(kWeighted ? __shfl_sync(kAllLanes, weight, lane) : 1.0f);
        u8* const to = packet(f, token);
#pragma unroll
        for (i32 single = 0; single < P::kSingleSteps; ++single) {
            const i32 first = 2 * single, then = min(first + 1, P::kSteps - 1);
            const u32 high = ends_line() ? held[then][0][0] : held[first][1][0];
            ulonglong2 words = make_ulonglong2(static_cast<u64>(high) << 32 | held[first][0][0],
                                               static_cast<u64>(held[then][1][0]) << 32 | held[then][0][0]);
            if (ends_line()) words.y = word_signal(c.round.tag, bits);
            if (P::is_single_line(packet_line(single))) store_line_words(to + single * kWarp * 16 + lane_id() * 16, words);
        }
        return true;
    }

    MOECOMM_FN void load_row(const PendingItem& f, i32 row, u32 (&held)[P::kSteps][2][kHeldWords]) const {
        const u8* const piece = y_row(row) + P::column(f.piece) * bytes_of(cfg.type);
        const i32 words = P::words(f.piece);
#pragma unroll
        for (i32 at = 0; at < P::kSteps * 2; ++at)
            load_held(piece + (packet_word(at / 2) + at % 2) * kHeldBytes, P::has(at / 2, at % 2, words), held[at / 2][at % 2]);
    }
    MOECOMM_FN static void load_held(const u8* from, bool has, u32 (&held)[kHeldWords]) {
        if constexpr (kHeldWords == 1) {
            held[0] = has ? *reinterpret_cast<const u32*>(from) : 0;
        } else if constexpr (kHeldWords == 2) {
            const uint2 words = has ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
            held[0] = words.x, held[1] = words.y;
        } else {
            const uint4 words = has ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
            held[0] = words.x, held[1] = words.y, held[2] = words.z, held[3] = words.w;
        }
    }

    MOECOMM_FN static void add(const u32 (&held)[P::kSteps][2][kHeldWords], float weight, float (&sum)[P::kSteps][2][P::kColumns]) {
        constexpr i32 each = 4 / bytes_of(cfg.type);
#pragma unroll
        for (i32 at = 0; at < P::kSteps * 2; ++at) {
            float columns[P::kColumns];
#pragma unroll
            for (i32 i = 0; i < kHeldWords; ++i) widen_word<cfg.type>(held[at / 2][at % 2][i], columns + i * each);
#pragma unroll
            for (i32 i = 0; i < P::kColumns; ++i) {
                float& to = sum[at / 2][at % 2][i];
                to = __fadd_rn(to, kWeighted ? __fmul_rn(weight, columns[i]) : columns[i]);
            }
        }
    }

    MOECOMM_FN static u64 narrow(const float (&columns)[P::kColumns]) {
        const u32 low = narrow_word<cfg.staged()>(columns), high = narrow_word<cfg.staged()>(columns + P::kColumns / 2);
        return static_cast<u64>(high) << 32 | low;
    }

    // Loads an item before the previous one is stored. In the flat layout both have registers of their own, because a move between them
    // would wait for the loads.
    MOECOMM_FN bool run() {
        PendingItem one, other;
        begin(one);
        while (one.source_rank >= 0) {
            begin(other);
            if (!finish(one)) break;
            if constexpr (kCopies) {
                if (other.source_rank < 0) return true;
                begin(one);
                finish(other);
            } else {
                one = other;
            }
        }
        if constexpr (cfg.own_weights) return report();
        return true;
    }
};

// Called by each reduce warp, or by all warps where there are none. Returns false if a weight did not arrive; the failure record is filled.
template <class Call>
MOECOMM_FN bool push(const Call& c) {
    return Push<Call>(c).run();
}

}  // namespace moecomm
