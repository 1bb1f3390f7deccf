// Rows that are fetched in order, by several, and counted together: which somebody fetches, and how many of the first are there.  Plain
// C++: tests run it on the host, with threads.
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {

// What a warp fetches: of the `first` rows at most `claims` that nobody has; then row `then`, and every `step`-th from there on.
struct Wanted {
    i32 rows, first, claims, then, step;

    // A warp of each block one of the first rows: those blocks that run have them, however many these are.
    MOECOMM_BOTH static Wanted of_all(i32 rows, i32 first, i32 block, i32 blocks, i32 warp) {
        return {rows, first, block + blocks * warp < first ? 1 : 0, rows, 0};
    }
    // And then: what nobody has claimed, and all others.
    MOECOMM_BOTH static Wanted of_fetcher(i32 rows, i32 first, i32 block, i32 fetchers, i32 warp, i32 warps) {
        return {rows, first, first, first + block + fetchers * warp, fetchers * warps};
    }

    // Not less than `rows` if there is none; claim(): 0, 1, 2 and so on, each once.
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

struct Arrivals {
    i32 rows;     // of all
    i32 counted;  // of a counter

    MOECOMM_BOTH i32 counters() const { return ceil_div(rows, counted); }
    MOECOMM_BOTH i32 wanted(i32 counter) const {
        const i32 left = rows - counter * counted;
        return left < counted ? left : counted;
    }
    // What some counters hold, those after the first `full`; load(counter) says it of one.  All are on their way together.
    static constexpr i32 kBatch = 4;
    struct Seen {
        i32 first, held[kBatch];
    };
    template <class Load>
    MOECOMM_BOTH Seen ask(i32 full, Load load) const {
        Seen seen{full, {}};
        const i32 last = counters() - 1;
        for (i32 i = 0; i < kBatch; ++i) seen.held[i] = load(full + i < last ? full + i : last);
        return seen;
    }
    // Counters that are full, from the first on.
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
