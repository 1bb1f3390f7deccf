// Rows that are fetched in order, by several, and counted by kFetchRows: how many of the first are there.  Plain C++: tests run it on the
// host, with threads.
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {

constexpr i32 kFetchRows = 128;  // of a counter

struct Arrivals {
    i32 rows;  // of all

    MOECOMM_BOTH i32 counters() const { return ceil_div(rows, kFetchRows); }
    MOECOMM_BOTH i32 wanted(i32 counter) const {
        const i32 left = rows - counter * kFetchRows;
        return left < kFetchRows ? left : kFetchRows;
    }
    // Counters that are full, from the first on, when `full` of them were: load(counter) says what one holds.  Several are loaded together.
    template <class Load>
    MOECOMM_BOTH i32 look(i32 full, Load load) const {
        constexpr i32 kTogether = 4;
        i32 seen[kTogether];
        const i32 first = full, last = counters() - 1;
        for (i32 i = 0; i < kTogether; ++i) seen[i] = load(first + i < last ? first + i : last);
        for (i32 i = 0; i < kTogether; ++i)
            if (full == first + i && full <= last && seen[i] == wanted(full)) ++full;
        return full;
    }
};

}  // namespace moecomm
