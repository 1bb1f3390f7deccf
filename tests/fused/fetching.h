// Rows that are fetched (csrc/fused/arrivals.h) by threads, warps of a cluster one after the other.
#pragma once
#include <atomic>
#include <thread>
#include <vector>

#include "fused/arrivals.h"
#include "gemm/tiles.h"

namespace moecomm {

struct Fetching {
    Arrivals arrivals;
    std::vector<std::atomic<i32>> fetched, row_is_there;
    std::atomic<i32> claimed{0};

    Fetching(i32 rows, i32 counted) : arrivals{rows, counted}, fetched(arrivals.counters() + 1), row_is_there(rows + 1) {}

    // As if each warp were as far as the others: rows step on together.
    void fetch(std::vector<Wanted> warps) {
        for (i32 round = 0, more = 1; more != 0; ++round) {
            more = 0;
            for (Wanted& warp : warps) {
                const i32 row = warp.next([&] { return claimed.fetch_add(1); });
                if (row >= arrivals.rows) continue;
                more = 1;
                row_is_there[row].store(1, std::memory_order_relaxed);
                fetched[row / arrivals.counted].fetch_add(1, std::memory_order_release);
            }
            if ((round + claimed) % 3 == 0) std::this_thread::yield();
        }
    }
    bool all_there(const Tile& tile, i32& full) {
        full = arrivals.look(full, [&](i32 counter) { return fetched[counter].load(std::memory_order_acquire); });
        return full * arrivals.counted >= tile.row + tile.rows;
    }
    i32 missing(const Tile& tile) const {
        i32 found = 0;
        for (i32 row = tile.row; row < tile.row + tile.rows; ++row) found += row_is_there[row].load(std::memory_order_relaxed) == 0;
        return found;
    }
};

}  // namespace moecomm
