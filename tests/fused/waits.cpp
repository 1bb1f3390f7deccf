// Who waits for whom in the first launch of a layer (csrc/fused/fetch.cuh), with a thread a cluster: its tiles, counters and their order
// are those of csrc/fused.  Clusters begin in order, and no more than `resident` run at once.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "fetching.h"

using namespace moecomm;

namespace {

struct Launch {
    const Grouping& grouping;
    const i32* counts;
    Deal deal;
    i32 warps;  // of a cluster that fetches
    Fetching fetching;
    std::vector<std::atomic<i32>> made;
    std::atomic<i32> next{0}, wrong{0};
    std::chrono::steady_clock::time_point end;

    Launch(const Grouping& g, const i32* c, Deal d, i32 w, i32 rows, i32 counted)
        : grouping(g),
          counts(c),
          deal(d),
          warps(w),
          fetching(rows, counted),
          made(TileWalk::count(g, c) + 1),
          end(std::chrono::steady_clock::now() + std::chrono::seconds(20)) {}

    void fetch(i32 cluster) {
        std::vector<Wanted> wanted;
        for (i32 warp = 0; warp < warps; ++warp)
            wanted.push_back(Wanted::of_fetcher(fetching.arrivals.rows, 0, cluster, deal.helpers, warp, warps));
        fetching.fetch(wanted);
    }

    void multiply(i32 cluster) {
        TileWalk walk(grouping, counts);
        i32 full = 0, index = deal.first(cluster);
        for (Tile tile; walk.find(index, tile); index = deal.next(cluster, index)) {
            while (!fetching.all_there(tile, full)) {
                std::this_thread::yield();
                if (std::chrono::steady_clock::now() > end) {
                    ++wrong;
                    return;
                }
            }
            wrong += fetching.missing(tile);
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
