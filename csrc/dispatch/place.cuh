// Step 4, first half: the final row of every entry of this rank's tokens (csrc/protocol/slots.h), written to the route, where the send
// warps read it. There are two passes: while round headers are in flight, the place among this block's entries; then, when the offsets of
// all ranks are known, the row.
#pragma once
#include "call.cuh"

namespace moecomm {

// Called by all lanes of a warp. Returns the lanes with the same key as the calling lane; a lane with key -1 is alone.
MOECOMM_FN u32 lanes_with(i32 key) { return __match_any_sync(kAllLanes, key >= 0 ? key : -1 - lane_id()); }

// Called after agree(). Clamps a row to the memory that `rank` has for it. Ids are read once for counting and again for placing. If another
// stream changes them in between, the places do not fit the counts that all ranks agreed on; rows are then wrong, but stay in bounds. Where
// a rank has room for none (max_rows=0), the row is -1: senders of rows take it for no row, and a block of row descriptors has room ahead
// of its rows (payload_of in runtime/dispatch_plan.cpp).
template <class Call>
MOECOMM_FN i32 row_inside(const Call& c, i32 rank, i32 row) {
    return min(row, c.shared.headers[rank].max_rows - 1);
}

// Called by one thread. Stores the range of flat rows that a chunk has at a rank, for the chunk's signal.
template <class Call>
MOECOMM_FN void keep_range(const Call& c, i32 chunk, i32 rank, i32 first, i32 end) {
    *c.range(rank, chunk) = signal_word(chunk_signal(0, first, end - first));
}

// Called by one thread when offsets are final. Stores a range after clamping its rows.
template <class Call>
MOECOMM_FN void keep_final_range(const Call& c, i32 chunk, i32 rank, i32 first, i32 end) {
    end = row_inside(c, rank, end - 1) + 1;
    keep_range(c, chunk, rank, min(first, end), end);
}

// The ranges of a chunk while its places are assigned: a lane for each rank. All lanes of a warp call both methods together.
template <class Call>
struct Range {
    static constexpr DispatchConfig cfg = Call::cfg;
    i32 first[cfg.peers_per_lane()];

    MOECOMM_FN void begin(const i32* cursors) {
#pragma unroll
        for (i32 i = 0; i < cfg.peers_per_lane(); ++i)
            first[i] = i * kWarp + lane_id() < cfg.ranks ? cursors[cfg.experts + i * kWarp + lane_id()] : 0;
    }
    template <bool is_final>
    MOECOMM_FN void end(const Call& c, i32 chunk, const i32* cursors) const {
#pragma unroll
        for (i32 i = 0; i < cfg.peers_per_lane(); ++i) {
            const i32 p = i * kWarp + lane_id();
            if (p >= cfg.ranks) continue;
            if constexpr (is_final) {
                keep_final_range(c, chunk, p, first[i], cursors[cfg.experts + p]);
            } else {
                keep_range(c, chunk, p, first[i], cursors[cfg.experts + p]);
            }
        }
    }
};

// Called by all lanes of a warp. Assigns places to the tokens [first, end), which are complete chunks. Entries of one expert, and tokens
// for one rank, take consecutive places; `cursors` hold the next place of each column. With `is_final` the places are rows. Cannot fail.
template <bool is_final, class Call>
MOECOMM_FN void place_tokens(const Call& c, i32 first, i32 end, i32* cursors) {
    constexpr DispatchConfig cfg = Call::cfg;
    auto* token_rows = reinterpret_cast<i32*>(c.a.route.token_rows);
    auto* token_owner = reinterpret_cast<i32*>(c.a.route.token_owner);
    auto* token_slot = reinterpret_cast<i32*>(c.a.route.token_slot);
    const i32 chunk_tokens = c.a.chunk_tokens, per_step = min(cfg.even_step(), chunk_tokens);  // a step never spans two chunks
    const u32 below = lanes_below();
    Range<Call> range;
    for_entries(c, first, end, 0, 1, per_step, [&](i32 at, i32 token, i32 k, i64 id) {
        if (at % chunk_tokens == 0) range.begin(cursors);
        if (!valid_id(id, cfg.experts)) id = -1;  // the round will be invalid
        const i32 expert = static_cast<i32>(id), owner = id >= 0 ? cfg.ranges().owner(expert) : -1;
        const u32 same = lanes_with(expert);
        const u32 mates = lanes_of_rank<cfg.ranks>(owner) & lanes_of_token<cfg.topk>();  // lanes of this token's entries at the same owner
        const bool leads = id >= 0 && (mates & below) == 0;
        const u32 leaders = lanes_of_rank<cfg.ranks>(leads ? owner : -1);
        i32 row = id >= 0 ? cursors[expert] + __popc(same & below) : -1;
        i32 slot = leads ? cursors[cfg.experts + owner] + __popc(leaders & below) : -1;
        if constexpr (is_final) {
            if (id >= 0) row = row_inside(c, owner, row);
            if (leads) slot = row_inside(c, owner, slot);
        }
        slot = __shfl_sync(kAllLanes, slot, mates != 0 ? __ffs(mates) - 1 : lane_id());
        i32* slots = token_slot + static_cast<i64>(at) * cfg.ranks;
        for (i32 i = lane_id(); i < min(per_step, end - at) * cfg.ranks; i += kWarp) slots[i] = -1;
        __syncwarp();  // the -1 stores come before the slots
        if (id >= 0 && (same & below) == 0) cursors[expert] += __popc(same);
        if (leads && (leaders & below) == 0) cursors[cfg.experts + owner] += __popc(leaders);
        __syncwarp();
        if (token >= 0) {
            const i64 entry = static_cast<i64>(token) * cfg.topk + k;
            token_rows[entry] = cfg.layout == Layout::flat ? slot : row;
            token_owner[entry] = owner;
            if (leads) token_slot[static_cast<i64>(token) * cfg.ranks + owner] = slot;
        }
        if ((at + per_step) % chunk_tokens == 0 || at + per_step >= end) range.template end<is_final>(c, at / chunk_tokens, cursors);
    });
}

// Called by one warp after the round was found valid. Assigns the rows of all tokens of the block in one pass.
template <class Call>
MOECOMM_FN void place_all_tokens(const Call& c) {
    i32* cursors = c.counters(0);
    for (i32 column = lane_id(); column < Call::cfg.columns(); column += kWarp) cursors[column] += c.shared.base[column];
    __syncwarp();
    place_tokens<true>(c, c.share.first, c.share.end, cursors);
}

// Called by a warp. In a repeat, the rows are known and only the ranges are missing, because the chunk size may differ from that of the
// earlier dispatch.
template <class Call>
MOECOMM_FN void range_chunk(const Call& c, i32 chunk) {
    constexpr DispatchConfig cfg = Call::cfg;
    const auto* slots = reinterpret_cast<const i32*>(c.a.route.token_slot);
    for (i32 p = lane_id(); p < cfg.ranks; p += kWarp) {
        i32 first = -1, count = 0;
#pragma unroll 8
        for (i32 token = chunk * c.a.chunk_tokens; token < c.chunk_end(chunk); ++token) {
            const i32 slot = slots[static_cast<i64>(token) * cfg.ranks + p];
            if (slot >= 0 && count++ == 0) first = slot;
        }
        keep_range(c, chunk, p, max(first, 0), max(first, 0) + count);
    }
}

// Called by all threads. Assigns places within this block's share. Each warp that counted places its own tokens; its counters hold what
// comes before. Cannot fail.
template <class Call>
MOECOMM_FN void place_share(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    const i32 warp = warp_id();
    if constexpr (cfg.repeat) {
        if (!c.in_team()) return;
        for (i32 chunk = c.share.first_chunk + warp; chunk < c.share.end_chunk; chunk += Call::kTeamWarps) range_chunk(c, chunk);
    } else if (warp < c.count_warps()) {
        place_tokens<false>(c, c.counted_from(warp), c.counted_from(warp + 1), c.counters(warp));
    }
}

// Called by `warps` warps, from warp `from` on. Calls store(i, load(i)) for each i in [first, end). Several words are loaded together
// before the first is stored.
template <class Load, class Store>
MOECOMM_FN void map_words(i32 from, i32 warps, i32 first, i32 end, Load load, Store store) {
    constexpr i32 kBatch = 12;
    const i32 thread = threadIdx.x - from * kWarp, threads = warps * kWarp;
    if (thread < 0 || thread >= threads) return;
    for (i32 base = first + thread; base < end; base += kBatch * threads) {
        decltype(load(first)) words[kBatch];
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i)
            if (base + i * threads < end) words[i] = load(base + i * threads);
#pragma unroll
        for (i32 i = 0; i < kBatch; ++i)
            if (base + i * threads < end) store(base + i * threads, words[i]);
    }
}

// Called by the team after the round was found valid. Turns places into rows by adding the final offsets. Entries, slots and ranges are
// processed at once by separate warps: no row moves before all of them are done, and nothing hides their loads. Ends in a barrier of the
// team. Cannot fail.
template <class Call>
MOECOMM_FN void finalize_share(const Call& c) {
    constexpr DispatchConfig cfg = Call::cfg;
    if constexpr (!cfg.repeat) {
        constexpr i32 warps = Call::kTeamWarps, of_slots = warps > 3 ? warps * 3 / 10 : 1, of_entries = warps - of_slots - 1;
        static_assert(of_entries > 0, "warps for each of them");
        auto* rows = reinterpret_cast<i32*>(c.a.route.token_rows);
        auto* slots = reinterpret_cast<i32*>(c.a.route.token_slot);
        const auto* owners = reinterpret_cast<const i32*>(c.a.route.token_owner);
        const i32* base = c.shared.base;
        struct Entry {
            i32 place, owner, local;
        };
        const auto entry = [&](i32 i) {
            return Entry{rows[i], owners[i], cfg.layout == Layout::flat ? 0 : owners[i] < 0 ? 0 : c.local_at(i, owners[i])};
        };
        map_words(0, of_entries, c.share.first * cfg.topk, c.share.end * cfg.topk, entry, [&](i32 i, Entry e) {
            if (e.place < 0) return;
            const i32 column = cfg.layout == Layout::flat ? cfg.experts + e.owner : cfg.ranges().first(e.owner) + e.local;
            rows[i] = row_inside(c, e.owner, e.place + base[column]);
        });
        map_words(
            of_entries, of_slots, c.share.first * cfg.ranks, c.share.end * cfg.ranks, [&](i32 i) { return slots[i]; },
            [&](i32 i, i32 slot) {
                const i32 rank = i % cfg.ranks;
                if (slot >= 0) slots[i] = row_inside(c, rank, slot + base[cfg.experts + rank]);
            });
        const auto chunk_of = [&](i32 i) { return c.share.first_chunk + i / cfg.ranks; };
        map_words(
            of_entries + of_slots, 1, 0, (c.share.end_chunk - c.share.first_chunk) * cfg.ranks,
            [&](i32 i) { return *c.range(i % cfg.ranks, chunk_of(i)); },
            [&](i32 i, u64 placed) {
                const i32 rank = i % cfg.ranks, first = signal_first(placed) + base[cfg.experts + rank];
                keep_final_range(c, chunk_of(i), rank, first, first + signal_count(placed));
            });
    }
    fence_async_shared();  // bulk loads overwrite the counters
    if constexpr (Call::kTeam < cfg.threads()) {
        c.team_any(false);
    } else {
        __syncthreads();
    }
}

}  // namespace moecomm
