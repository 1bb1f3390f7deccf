// Budgets of rows: which entries of a routing their ranks have room for. One warp an expert, and one for all else. The rows of a rank are
// in the order of its experts, padded, then of source ranks, then of tokens; a row at or behind the rank's budget is dropped.
#pragma once
#include "../device/lanes.cuh"
#include "args.h"
#include "row_pass.cuh"

namespace moecomm {

// Called by a warp. Calls body(entry, id, nth) in the lane of each entry of `expert`; `nth` counts them in order. Returns their number.
template <class Id, class Body>
MOECOMM_FN i32 each_entry_of(const BudgetArgs& a, i32 expert, const Body& body) {
    i32 found = 0;
#pragma unroll 4
    for (i32 first = 0; first < a.entries; first += kWarp) {
        const i32 entry = first + lane_id();
        const i64 id = entry < a.entries ? static_cast<i64>(reinterpret_cast<const Id*>(a.ids)[entry]) : -1;
        const u32 all = __ballot_sync(kAllLanes, id == expert);
        if (id == expert) body(entry, id, found + __popc(all & lanes_below()));
        found += __popc(all);
    }
    return found;
}

// Write what every rank is sent: the number of this rank's entries of each expert, its budget and zeros; and whom each row is for.
template <class Id>
MOECOMM_FN void count_entries(const BudgetArgs& a) {
    i32* const table = reinterpret_cast<i32*>(a.table);
    each_row(a.experts + 1, [&](i64 expert) {
        if (expert < a.experts) {
            const i32 count = each_entry_of<Id>(a, static_cast<i32>(expert), [](i32, i64, i32) {});
            for (i32 rank = lane_id(); rank < a.ranks; rank += kWarp) table[static_cast<i64>(rank) * a.pitch + expert] = count;
            return;
        }
        for (i32 rank = lane_id(); rank < a.ranks; rank += kWarp) {
            reinterpret_cast<i64*>(a.to)[rank] = rank;
            for (i32 column = a.experts; column < a.pitch; ++column)
                table[static_cast<i64>(rank) * a.pitch + column] = column == a.experts ? a.budget : 0;
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
    each_row(a.experts + 1, [&](i64 of) {
        const i32 expert = static_cast<i32>(of);
        if (expert < a.experts) {
            const i32 owner = expert / local;
            i64 before = 0;  // rows of earlier ranks for this expert
            for (i32 rank = lane_id(); rank < a.rank; rank += kWarp) before += table[static_cast<i64>(rank) * a.pitch + expert];
            const i64 first = padded_rows(a, owner * local, expert) + sum_of_warp(before);
            const i64 room = table[static_cast<i64>(owner) * a.pitch + a.experts] - first;
            each_entry_of<Id>(a, expert, [&](i32 entry, i64 id, i32 nth) { kept[entry] = static_cast<Id>(nth < room ? id : -1); });
            return;
        }
        for (i32 entry = lane_id(); entry < a.entries; entry += kWarp) {
            const Id id = reinterpret_cast<const Id*>(a.ids)[entry];
            if (id < 0 || id >= a.experts) kept[entry] = id;
        }
        const i64 needed = padded_rows(a, a.rank * local, (a.rank + 1) * local);
        if (lane_id() != 0) return;
        *reinterpret_cast<i64*>(a.needed) = needed;
        *reinterpret_cast<i32*>(a.overflow) = needed > table[static_cast<i64>(a.rank) * a.pitch + a.experts];
    });
}

}  // namespace moecomm
