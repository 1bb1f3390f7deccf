// Step 3a: with the counts of all ranks, each block knows for every column the sum, and what the ranks before this one have. A column is an
// expert or the flat rows of a rank.
#pragma once
#include "call.cuh"

namespace moecomm {

// Up to this many ranks, the wait for a header is timed once a poll for counts has been in vain. Beyond, the registers of those polls are
// all in use, and one more load ahead of the many is not noticed.
constexpr i32 kTimedInPolls = 8;
// Not in kernels that send packets, where a send warp does it (dispatch.cuh): a thread that looks for a header first, and then for the
// counts that came with it, is late by a load. Not where a cast and packets of other ranks take all registers: the combine that follows
// times the same ranks.
MOECOMM_BOTH constexpr bool times_headers(const DispatchConfig& cfg) {
    return !cfg.packets &&
           !(cfg.packet_lines > 0 && cfg.quantize && (cfg.scale_format == ScaleFormat::ue8m0 || cfg.hidden % kQuantGroup != 0));
}

// Each block adds up every column, a thread for each. The work of a word is a few instructions, because there are ranks * columns of them.
template <class Call>
MOECOMM_FN bool sum_all_columns(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 bits = cfg.packet_lines > 0 ? kWantedWords : 0;
    constexpr bool times = times_headers(cfg) && cfg.ranks <= kTimedInPolls;
    // Loads at once, as many as registers hold without spilling (tests/device/test_compile.py).
    constexpr i32 in_flight = cfg.ranks <= 8 ? 8 : cfg.threads() > 720 ? 4 : 16;
    for (i32 column = c.team_thread(); column < cfg.columns() + bits; column += c.kTeam) {
        const u64 first = tagged_word(c.round, 0, kHeaderWords + column);
        const i64 stride = static_cast<i64>(tagged_word(c.round, 1, 0) - tagged_word(c.round, 0, 0));
        const i32 local = column - c.first_expert();
        const bool is_bits = column >= cfg.columns();
        const bool is_here = (cfg.packet_lines > 0 || cfg.descriptors) && local >= 0 && local < c.experts_here();
        // Place of what is kept for each source: its bits, or the counts of earlier sources.
        i32* const kept = is_bits                          ? reinterpret_cast<i32*>(c.shared.arriving[0]) + column - cfg.columns()
                          : is_here                        ? c.shared.into + local
                          : column == cfg.experts + c.me() ? c.shared.slots_before
                                                           : nullptr;
        const i32 pitch = is_bits ? kWantedWords : is_here ? cfg.ranges().most() : 1;
        i32 polls = 0, total = 0, before = 0;
        const bool in_time = await_words<in_flight>(
            c.round, Phase::header, cfg.ranks, [&](i32 source) { return first + source * stride; }, [](i32 source) { return source; },
            [&](i32 missing_peer) {
                if (++polls == 1 && times && blockIdx.x == 0 && column < cfg.ranks) time_header(c.round, column);
                return polls % 16 == 0 && call_differs(c.round, missing_peer, c.shared.mine);
            },
            [&](i32 source, u32 word) {
                if (kept != nullptr) kept[source * pitch] = is_bits ? static_cast<i32>(word) : total;
                total += static_cast<i32>(word);
                if (source < c.me()) before += static_cast<i32>(word);
            });
        if (!in_time) return false;
        if (is_bits) continue;
        c.shared.total[column] = total;
        if (column == cfg.experts + c.me()) c.shared.slots_before[cfg.ranks] = total;
        c.shared.base[column] = before + c.shared.before[column];
    }
    return true;
}

// Waits for n tagged words of peers, as await_words does. Stops, without the rest, if a peer made another call: agree() then finds out.
template <i32 kBatch, class Call, class At, class From, class Take>
MOECOMM_FN bool await_counts(const Call& c, i32 n, At at, From from, Take take) {
    i32 polls = 0;
    return await_words<kBatch>(
        c.round, Phase::header, n, at, from, [&](i32 nth) { return ++polls % 16 == 0 && call_differs(c.round, from(nth), c.shared.mine); },
        take);
}

// Blocks share the columns: a warp adds up one, with a rank or two in each lane, and stores its sums as tagged words for all blocks of this
// rank.
template <class Call>
MOECOMM_FN bool share_columns(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    constexpr i32 looks = ceil_div(cfg.ranks, kWarp), last = cfg.ranks - 1, at_once = 4;
    const i32 stride = c.kTeamWarps * static_cast<i32>(gridDim.x), warp = blockIdx.x + gridDim.x * c.team_warp();
    const auto source_of = [](i32 nth) { return min(nth % looks * kWarp + lane_id(), last); };
    for (i32 first = warp; first < cfg.columns(); first += at_once * stride) {
        u32 counts[at_once * looks] = {};  // in registers: places in it are known to the compiler
        const i32 here = min(ceil_div(cfg.columns() - first, stride), at_once);
        const bool in_time = await_counts<at_once * looks>(
            c, here * looks, [&](i32 nth) { return tagged_word(c.round, source_of(nth), kHeaderWords + first + nth / looks * stride); },
            source_of,
            [&](i32 nth, u32 count) { counts[nth % (at_once * looks)] = nth % looks * kWarp + lane_id() < cfg.ranks ? count : 0; });
        if (!__all_sync(kAllLanes, in_time)) return false;
#pragma unroll
        for (i32 i = 0; i < at_once; ++i) {
            if (i >= here) break;
            u32 total = 0, before = 0;
#pragma unroll
            for (i32 look = 0; look < looks; ++look) {
                total += counts[i * looks + look];
                before += look * kWarp + lane_id() < c.me() ? counts[i * looks + look] : 0;
            }
            total = __reduce_add_sync(kAllLanes, total), before = __reduce_add_sync(kAllLanes, before);
            u64* const sums = own<u64>(c.a.ctx, column_sums_at(c.window(), c.round.tag, first + i * stride));
            if (lane_id() < 2) store_relaxed(sums + lane_id(), word_signal(c.round.tag, lane_id() == 0 ? total : before));
        }
    }
    return true;
}

// Reads the sums of all columns, which blocks share.
template <class Call>
MOECOMM_FN bool read_shared_columns(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 thread = c.team_thread(), columns = ceil_div(max(cfg.columns() - thread, 0), c.kTeam);
    return await_words<4>(
        c.round, Phase::grid, 2 * columns,
        [&](i32 nth) { return column_sums_at(c.window(), c.round.tag, thread + nth / 2 * c.kTeam) + nth % 2 * sizeof(u64); },
        [&](i32) { return c.me(); }, [](i32) { return false; },
        [&](i32 nth, u32 sum) {
            const i32 column = thread + nth / 2 * c.kTeam;
            if (nth % 2 == 0) c.shared.total[column] = static_cast<i32>(sum);
            if (nth % 2 == 1) c.shared.base[column] = static_cast<i32>(sum) + c.shared.before[column];
        });
}

// Words of a source rank that every block keeps: its flat rows here, its rows for each expert here, and the bits of its tokens that arrive.
template <class Call>
struct KeptWords {
    static constexpr DispatchConfig cfg = Call::cfg;
    const Call& c;
    const i32 counts;  // of these, all but the first for packets and row descriptors

    MOECOMM_FN explicit KeptWords(const Call& call)
        : c(call), counts((cfg.packet_lines > 0 || cfg.descriptors ? call.experts_here() : 0) + 1) {}
    MOECOMM_FN i32 of_a_source() const { return counts + (cfg.packet_lines > 0 ? kWantedWords : 0); }
    MOECOMM_FN i32 word(i32 nth) const {
        return kHeaderWords + (nth == 0 ? cfg.experts + c.me() : nth < counts ? c.first_expert() + nth - 1 : cfg.columns() + nth - counts);
    }
    MOECOMM_FN i32* place(i32 source, i32 nth) const {
        if (nth == 0) return c.shared.slots_before + source;
        if (nth < counts) return c.shared.into + source * cfg.ranges().most() + nth - 1;
        return reinterpret_cast<i32*>(&c.shared.arriving[source][nth - counts]);
    }

    // Called by the team.
    MOECOMM_FN bool read() const {
        const i32 of_each = of_a_source(), thread = c.team_thread(), n = ceil_div(max(cfg.ranks * of_each - thread, 0), c.kTeam);
        const auto source_of = [&](i32 nth) { return (thread + nth * c.kTeam) / of_each; };
        const auto nth_word = [&](i32 nth) { return (thread + nth * c.kTeam) % of_each; };
        return await_counts<4>(
            c, n, [&](i32 nth) { return tagged_word(c.round, source_of(nth), word(nth_word(nth))); }, source_of,
            [&](i32 nth, u32 value) { *place(source_of(nth), nth_word(nth)) = static_cast<i32>(value); });
    }
    // Called by the team after a barrier; another one must follow. Turns the counts into those of earlier sources.
    MOECOMM_FN void add_up() const {
        for (i32 nth = c.team_warp(); nth < counts; nth += c.kTeamWarps) {
            i32 before = 0;
#pragma unroll 1
            for (i32 first = 0; first < cfg.ranks; first += kWarp) {
                const i32 source = first + lane_id(), count = source < cfg.ranks ? *place(source, nth) : 0;
                const i32 sum = sum_up_to_lane(count);
                if (source < cfg.ranks) *place(source, nth) = before + sum - count;
                before += __shfl_sync(kAllLanes, sum, kWarp - 1);
            }
            if (nth == 0 && lane_id() == 0) c.shared.slots_before[cfg.ranks] = before;
        }
    }
};

// Called by the team. For each column, adds up the counts of all ranks and of the ranks before this one; with packets, also reads the bits
// of the tokens that arrive. Tagged words need no acquire. Returns false in a thread whose words did not arrive; the failure record is
// filled.
template <class Call>
MOECOMM_FN bool sum_counts(const Call& c) {
    if constexpr (shares_columns(Call::cfg.ranks)) {
        return share_columns(c) && KeptWords<Call>(c).read() && read_shared_columns(c);
    } else {
        return sum_all_columns(c);
    }
}

// Called by the team between the barriers that follow.
template <class Call>
MOECOMM_FN void finish_counts(const Call& c) {
    if constexpr (shares_columns(Call::cfg.ranks)) KeptWords<Call>(c).add_up();
}

}  // namespace moecomm
