// Model of the waits in the one launch of a layer (csrc/fused/expert_layer.cuh), with a thread a cluster: the order of its tiles, and what
// counts them, are those of csrc/fused.  Clusters begin in order, and no more than `resident` run at once.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "fetching.h"
#include "fused/lagged.h"

using namespace moecomm;

namespace {

constexpr i32 kQueued = 2;  // tiles that a cluster has taken: one is made meanwhile

struct Launch {
    const Grouping &first, &second;
    const i32* counts;
    i32 lag, turn, clusters, fetchers, together, warps;
    Fetching fetching;
    std::vector<std::atomic<i32>> made;
    std::vector<std::atomic<i32>> times[2];  // that a tile has been made, by product
    std::atomic<i32> next{0}, taken{0}, wrong{0};
    std::chrono::steady_clock::time_point end;

    Launch(const Grouping& f, const Grouping& s, const i32* c, i32 rows, i32 l, i32 t, i32 all, i32 that_fetch, i32 before, i32 w,
           i32 counted)
        : first(f),
          second(s),
          counts(c),
          lag(l),
          turn(t),
          clusters(all),
          fetchers(that_fetch),
          together(before),
          warps(w),
          fetching(rows, counted),
          made(TileWalk::count_rows(f, c).all + 1),
          times{std::vector<std::atomic<i32>>(TileWalk::count(f, c) + 1), std::vector<std::atomic<i32>>(TileWalk::count(s, c) + 1)},
          end(std::chrono::steady_clock::now() + std::chrono::seconds(20)) {}

    void fetch(i32 cluster) {
        const i32 rows = fetching.arrivals.rows, first = rows < together ? rows : together;
        std::vector<Wanted> before, then;
        for (i32 warp = 0; warp < warps; ++warp) {
            before.push_back(Wanted::of_all(rows, first, cluster, clusters, warp));
            then.push_back(Wanted::of_fetcher(rows, first, cluster, fetchers, warp, warps));
        }
        fetching.fetch(before);
        if (cluster < fetchers) fetching.fetch(then);
    }

    // False when it takes too long.
    template <class Ready>
    bool wait(Ready ready) {
        while (!ready()) {
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() > end) {
                ++wrong;
                return false;
            }
        }
        return true;
    }

    struct Taken {
        Tile tile;
        bool is_second;
        i32 position;
    };
    // A tile is made when the next ones have been taken, whatever these wait for.
    void multiply() {
        LaggedWalk walk(first, second, counts, TileWalk::count_rows(first, counts), lag, turn);
        std::vector<Taken> mine;
        i32 full = 0;
        for (bool more = true; more || !mine.empty();) {
            while (more && static_cast<i32>(mine.size()) < kQueued) {
                Taken one{{}, false, taken.fetch_add(1)};
                more = walk.find(one.position, one.tile, one.is_second);
                if (more) mine.push_back(one);
            }
            if (mine.empty()) return;
            const Taken now = mine.front();
            mine.erase(mine.begin());
            const bool in_time = now.is_second
                                     ? wait([&] { return made[now.tile.nth].load(std::memory_order_acquire) >= first.column_tiles; })
                                     : wait([&] { return fetching.all_there(now.tile, full); });
            if (!in_time) return;
            make(now);
        }
    }
    void make(const Taken& now) {
        const i32 number = now.tile.nth * (now.is_second ? second : first).column_tiles + now.tile.column;
        if (now.is_second) {
            for (i32 c = 0; c < first.column_tiles; ++c)
                wrong += times[0][now.tile.nth * first.column_tiles + c].load(std::memory_order_relaxed) != 1;
        } else {
            wrong += fetching.missing(now.tile);
        }
        times[now.is_second][number].fetch_add(1, std::memory_order_relaxed);
        if (!now.is_second) made[now.tile.nth].fetch_add(1, std::memory_order_release);
    }

    void run() {
        for (i32 cluster; (cluster = next.fetch_add(1)) < clusters;) {
            fetch(cluster);
            multiply();
        }
    }
};

}  // namespace

// Return the number of errors: waits that did not end, rows that were used before they were there, tiles that were not made once.
extern "C" i32 launched_at_once(const Grouping* first, const Grouping* second, const i32* counts, i32 rows, i32 lag, i32 turn, i32 clusters,
                                i32 fetchers, i32 together, i32 warps, i32 counted, i32 resident) {
    Launch launch(*first, *second, counts, rows, lag, turn, clusters, fetchers, together, warps, counted);
    std::vector<std::thread> threads;
    for (i32 i = 0; i < resident; ++i) threads.emplace_back([&] { launch.run(); });
    for (auto& thread : threads) thread.join();
    i32 wrong = launch.wrong;
    for (i32 i = 0; i < TileWalk::count(*first, counts); ++i) wrong += launch.times[0][i] != 1;
    for (i32 i = 0; i < TileWalk::count(*second, counts); ++i) wrong += launch.times[1][i] != 1;
    return wrong;
}
