// Who waits for whom in the first launch of a layer (csrc/fused/fetch.cuh), with a thread a cluster: its tiles, counters and their order
// are those of csrc/fused.  Clusters begin in order, and no more than `resident` run at once.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "fused/arrivals.h"
#include "fused/tiles.h"

using namespace moecomm;

namespace {

struct Launch {
    const Grouping& grouping;
    const i32* counts;
    Deal deal;
    i32 warps;  // of a cluster that fetches
    Arrivals arrivals;
    std::vector<std::atomic<i32>> fetched, row_is_there, made;
    std::atomic<i32> next{0}, wrong{0};
    std::chrono::steady_clock::time_point end;

    Launch(const Grouping& g, const i32* c, Deal d, i32 w, i32 rows, i32 counted)
        : grouping(g),
          counts(c),
          deal(d),
          warps(w),
          arrivals{rows, counted},
          fetched(arrivals.counters() + 1),
          row_is_there(rows + 1),
          made(TileWalk::count(g, c) + 1),
          end(std::chrono::steady_clock::now() + std::chrono::seconds(20)) {}

    // A warp after the other, as if each were as far as the others: rows step on together.
    void fetch(i32 cluster) {
        std::vector<Wanted> wanted;
        for (i32 warp = 0; warp < warps; ++warp) wanted.push_back(Wanted::of_fetcher(arrivals.rows, 0, cluster, deal.helpers, warp, warps));
        for (i32 round = 0, more = 1; more != 0; ++round) {
            more = 0;
            for (Wanted& warp : wanted) {
                const i32 row = warp.next([] { return 0; });
                if (row >= arrivals.rows) continue;
                more = 1;
                row_is_there[row].store(1, std::memory_order_relaxed);
                fetched[row / arrivals.counted].fetch_add(1, std::memory_order_release);
            }
            if (round % 3 == cluster % 3) std::this_thread::yield();
        }
    }

    void multiply(i32 cluster) {
        TileWalk walk(grouping, counts);
        i32 full = 0, index = deal.first(cluster);
        for (Tile tile; walk.find(index, tile); index = deal.next(cluster, index)) {
            while (full * arrivals.counted < tile.row + tile.rows) {
                const i32 before = full;
                full = arrivals.look(before, [&](i32 counter) { return fetched[counter].load(std::memory_order_acquire); });
                if (full == before) std::this_thread::yield();
                if (std::chrono::steady_clock::now() > end) {
                    ++wrong;
                    return;
                }
            }
            for (i32 row = tile.row; row < tile.row + tile.rows; ++row) wrong += row_is_there[row].load(std::memory_order_relaxed) == 0;
            made[index].fetch_add(1);
        }
    }

    void run() {
        for (i32 cluster; (cluster = next.fetch_add(1)) < deal.clusters;) {
            if (cluster < deal.helpers) fetch(cluster);
            multiply(cluster);
        }
    }
};

}  // namespace

// What went wrong: waits that did not end, rows that were used before they were there, tiles that were not made once.
extern "C" i32 launched(const Grouping* grouping, const i32* counts, i32 rows, const Deal* deal, i32 warps, i32 counted, i32 resident) {
    Launch launch(*grouping, counts, *deal, warps, rows, counted);
    std::vector<std::thread> threads;
    for (i32 i = 0; i < resident; ++i) threads.emplace_back([&] { launch.run(); });
    for (auto& thread : threads) thread.join();
    i32 wrong = launch.wrong;
    for (i32 i = 0; i < TileWalk::count(*grouping, counts); ++i) wrong += launch.made[i] != 1;
    return wrong;
}
