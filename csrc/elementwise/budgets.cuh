// Budgets of rows: which entries of a routing their ranks have room for. A warp looks for the entries of one expert in one segment of the
// routing. The rows of a rank are in the order of its experts, padded, then of source ranks, then of tokens; a row at or behind the rank's
// budget is dropped.
#pragma once
#include "args.h"
#include "row_pass.cuh"

namespace moecomm {

// Entries loaded at once by a lane: a warp that waits for each load takes a millisecond for 128 Ki entries.
constexpr i32 kEntriesAtOnce = 16;

// Called by a warp. Calls body(entry, id, is_in) in all lanes, in order, for the entries of a segment, and for places
// behind its end, where is_in is false and id is -1.
template <class Id, class Body>
MOECOMM_FN void each_entry_of(const BudgetArgs& a, i32 segment, const Body& body) {
    const i32 each = ceil_div(a.entries, a.segments), end = min((segment + 1) * each, a.entries);
    for (i32 first = segment * each; first < end; first += kEntriesAtOnce * kWarp) {
        i64 ids[kEntriesAtOnce];
#pragma unroll
        for (i32 i = 0; i < kEntriesAtOnce; ++i) {
            const i32 entry = first + i * kWarp + lane_id();
            ids[i] = entry < end ? static_cast<i64>(reinterpret_cast<const Id*>(a.ids)[entry]) : -1;
        }
#pragma unroll
        for (i32 i = 0; i < kEntriesAtOnce; ++i) {
            const i32 entry = first + i * kWarp + lane_id();
            body(entry, ids[i], entry < end);
        }
    }
}

// Write what every rank is sent: the number of this rank's entries of each expert, its budget and zeros; and whom each row is for. A warp
// counts those of an expert in one segment.
template <class Id>
MOECOMM_FN void count_entries(const BudgetArgs& a) {
    i32* const table = reinterpret_cast<i32*>(a.table);
    each_row(a.experts * a.segments + 1, [&](i64 row) {
        if (row < a.experts * a.segments) {
            const i64 expert = row / a.segments;
            i32 count = 0;
            each_entry_of<Id>(a, static_cast<i32>(row % a.segments),
                              [&](i32, i64 id, bool) { count += __popc(__ballot_sync(kAllLanes, id == expert)); });
            if (lane_id() == 0) reinterpret_cast<i32*>(a.parts)[row] = count;
            for (i32 rank = lane_id(); rank < a.ranks; rank += kWarp) atomicAdd(table + static_cast<i64>(rank) * a.pitch + expert, count);
            return;
        }
        for (i32 rank = lane_id(); rank < a.ranks; rank += kWarp) {
            reinterpret_cast<i64*>(a.to)[rank] = rank;
            table[static_cast<i64>(rank) * a.pitch + a.experts] = a.budget;
        }
    });
}

// Called by a warp. Returns the rows of all ranks for experts `begin` to `end` of one rank, each padded.
MOECOMM_FN i64 padded_rows(const BudgetArgs& a, i32 begin, i32 end) {
    const i32* const table = reinterpret_cast<const i32*>(a.table);
    i64 rows = 0;
    for (i32 expert = begin + lane_id(); expert < end; expert += kWarp) {
        i64 total = 0;
        for (i32 rank = 0; rank < a.ranks; ++rank) total += table[static_cast<i64>(rank) * a.pitch + expert];
        rows += (total + a.alignment - 1) / a.alignment * a.alignment;
    }
    return sum_of_warp(rows);
}

// From the rows of all ranks: write the ids that there is room for and -1 in the place of others, the rows that this rank would need, and
// whether they are more than its budget. Ids that no expert has are kept.
template <class Id>
MOECOMM_FN void keep_entries(const BudgetArgs& a) {
    const i32* const table = reinterpret_cast<const i32*>(a.table);
    Id* const kept = reinterpret_cast<Id*>(a.kept);
    const i32 local = a.experts / a.ranks;
    each_row((a.experts + 1) * a.segments, [&](i64 row) {
        const i32 expert = static_cast<i32>(row / a.segments), segment = static_cast<i32>(row % a.segments);
        if (expert < a.experts) {
            const i32 owner = expert / local;
            i64 before = 0;  // rows for this expert of earlier ranks, and of earlier segments
            for (i32 rank = lane_id(); rank < a.rank; rank += kWarp) before += table[static_cast<i64>(rank) * a.pitch + expert];
            const i32* const parts = reinterpret_cast<const i32*>(a.parts) + expert * a.segments;
            for (i32 earlier = lane_id(); earlier < segment; earlier += kWarp) before += parts[earlier];
            const i64 first = padded_rows(a, owner * local, expert) + sum_of_warp(before);
            i64 room = table[static_cast<i64>(owner) * a.pitch + a.experts] - first;
            each_entry_of<Id>(a, segment, [&](i32 entry, i64 id, bool) {
                const u32 all = __ballot_sync(kAllLanes, id == expert);
                if (id == expert) kept[entry] = static_cast<Id>(__popc(all & lanes_below()) < room ? id : -1);
                room -= __popc(all);
            });
            return;
        }
        each_entry_of<Id>(a, segment, [&](i32 entry, i64 id, bool is_in) {
            if (is_in && (id < 0 || id >= a.experts)) kept[entry] = static_cast<Id>(id);
        });
        if (segment != 0) return;
        const i64 needed = padded_rows(a, a.rank * local, (a.rank + 1) * local);
        if (lane_id() != 0) return;
        *reinterpret_cast<i64*>(a.needed) = needed;
        *reinterpret_cast<i32*>(a.overflow) = needed > table[static_cast<i64>(a.rank) * a.pitch + a.experts];
    });
}

}  // namespace moecomm
