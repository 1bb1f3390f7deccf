// Bookkeeping of rows that several warps fetch in order: which rows a warp fetches, and how many rows from the first on have arrived.
// Plain C++: tests run it on the host, with threads.
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {

// The rows that a warp fetches: at most `claims` of the first `first` rows, claimed from a counter of the grid; then row `then` and every
// `step`-th row after it.
struct Wanted {
    i32 rows, first, claims, then, step;

    // First phase, all blocks: at most one of the first rows a warp.  The blocks that run claim them, however many blocks that are.
    MOECOMM_BOTH static Wanted of_all(i32 rows, i32 first, i32 block, i32 blocks, i32 warp) {
        return {rows, first, block + blocks * warp < first ? 1 : 0, rows, 0};
    }
    // Second phase, the fetching blocks: first rows that are still unclaimed, then a share of all later rows.
    MOECOMM_BOTH static Wanted of_fetcher(i32 rows, i32 first, i32 block, i32 fetchers, i32 warp, i32 warps) {
        return {rows, first, first, first + block + fetchers * warp, fetchers * warps};
    }

    // Returns the next row, or a value >= `rows` if there is none.  claim() must return 0, 1, 2 and so on, each once in the grid.
    template <class Claim>
    MOECOMM_BOTH i32 next(Claim claim) {
        if (claims > 0) {
            --claims;
            const i32 row = claim();
            if (row < first) return row;
            claims = 0;
        }
        const i32 row = then;
        then += step;
        return row;
    }
};

// Counters of arrived rows: counter i counts rows i * counted to (i + 1) * counted - 1.
struct Arrivals {
    i32 rows;     // in all
    i32 counted;  // rows of a counter

    MOECOMM_BOTH i32 counters() const { return ceil_div(rows, counted); }
    MOECOMM_BOTH i32 wanted(i32 counter) const {
        const i32 left = rows - counter * counted;
        return left < counted ? left : counted;
    }
    // Values of the kBatch counters after the first `full`.
    static constexpr i32 kBatch = 4;
    struct Seen {
        i32 first, held[kBatch];
    };
    // Reads them with load(counter); all loads are in flight at once.
    template <class Load>
    MOECOMM_BOTH Seen ask(i32 full, Load load) const {
        Seen seen{full, {}};
        const i32 last = counters() - 1;
        for (i32 i = 0; i < kBatch; ++i) seen.held[i] = load(full + i < last ? full + i : last);
        return seen;
    }
    // Returns how many counters, from the first on, are known to be full.
    MOECOMM_BOTH i32 full_by(const Seen& seen) const {
        i32 full = seen.first;
        for (i32 i = 0; i < kBatch; ++i)
            if (full == seen.first + i && full < counters() && seen.held[i] == wanted(full)) ++full;
        return full;
    }
    template <class Load>
    MOECOMM_BOTH i32 look(i32 full, Load load) const {
        return full_by(ask(full, load));
    }
};

}  // namespace moecomm
