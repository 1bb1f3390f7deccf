// Rows for the first GEMM: some of the blocks fetch them from their homes before they multiply, in the order in which the tiles want them,
// while the others have begun.  The first rows, which all wait for, all may fetch: a multiprocessor takes in a fraction of what links give.
//
// Every row is fetched for every expert that wants it.  Fetching waits for nobody: the dispatch has ended, and homes keep their rows until
// all of this round have landed there.  So every tile that waits for rows is made in the end.
#pragma once
#include "../device/bulk.cuh"
#include "../device/copy.cuh"
#include "layer.cuh"
#include "policies.cuh"
#include "ring.cuh"

// Where the compiler would leave something out of a kernel that is all one function (moecomm/cubin.py), kernel_loader.py has this called.
#ifdef MOECOMM_CALLS
#define MOECOMM_FETCH __device__ __noinline__
#else
#define MOECOMM_FETCH MOECOMM_FN
#endif

namespace moecomm {

MOECOMM_FN void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

constexpr i32 kFetchWarps = (1 + kMathGroups) * kWarpgroup / kWarp, kFetchSlots = 2;

// In memory of its own: what copies bring later to where a barrier has been may be lost (seen on an H200; PTX: mbarrier.inval).
struct FetchShared {
    static constexpr i32 kKept = 4;
    u64 full[kFetchWarps][kFetchSlots];
    i32 rows[kFetchWarps][kKept];  // of the last pieces that a warp has begun

    MOECOMM_FN void init() {
        for (i32 i = 0; i < kFetchWarps * kFetchSlots; ++i) barrier_init(&full[0][0] + i, 1);
    }
};
static_assert(kFetchSlots + 2 <= FetchShared::kKept, "those that load, and two that have been stored");

// One lane of a warp: brings rows piece by piece, a piece loading while another is stored.  The pieces of all warps are in `room` bytes of
// shared memory.
template <RowConfig r, i32 room>
struct Fetcher {
    static constexpr i32 kMost = room / (kFetchWarps * kFetchSlots) / 128 * 128, kPieces = ceil_div(r.bytes(), kMost);
    static constexpr i32 kPiece = align_up(ceil_div(r.bytes(), kPieces), 128), kWarpBytes = kFetchSlots * kPiece;

    const LayerArgs& a;
    FetchShared& shared;
    u8* const pieces;  // of this warp
    const i32 warp;
    i32 loaded = 0, stored = 0, published = 0;  // pieces
    u64 from = 0;                               // the row whose pieces are loading

    MOECOMM_FN i32& row_of(i32 piece) const { return shared.rows[warp][piece % FetchShared::kKept]; }
    MOECOMM_FN static i32 bytes_of_piece(i32 piece) { return min(kPiece, r.bytes() - piece % kPieces * kPiece); }

    // The next piece; false where that is of another row, and there is none.
    MOECOMM_FN bool load(Wanted& wanted) {
        const i32 part = loaded % kPieces, slot = loaded % kFetchSlots;
        if (part == 0) {
            const i32 row = wanted.next([&] { return atomicAdd(reinterpret_cast<i32*>(a.fetching), 1); });
            if (row >= wanted.rows) return false;
            row_of(loaded) = row;
            const Slip slip = reinterpret_cast<const Slip*>(a.slips)[row];
            const u64 home = a.ctx.peers[slip.home()];
            from = home + slip.row;
            reinterpret_cast<u64*>(a.homes)[row] = home + slip.landing();
        } else {
            row_of(loaded) = row_of(loaded - 1);
        }
        bulk_load(pieces + slot * kPiece, reinterpret_cast<const u8*>(from) + part * kPiece, bytes_of_piece(loaded),
                  &shared.full[warp][slot]);
        ++loaded;
        return true;
    }
    MOECOMM_FN void store() {
        const i32 part = stored % kPieces, slot = stored % kFetchSlots;
        copy_wait(&shared.full[warp][slot], stored / kFetchSlots & 1);
        u8* const to = reinterpret_cast<u8*>(a.rows) + static_cast<i64>(row_of(stored)) * r.pitch() + part * kPiece;
        bulk_store(to, pieces + slot * kPiece, bytes_of_piece(stored));
        bulk_commit();
        ++stored;
    }
    // All pieces before `end` have been written: bulk_wait.
    MOECOMM_FN void publish(i32 end) {
        for (; published < end; ++published) {
            if (published % kPieces != kPieces - 1) continue;
            u32* const counter = reinterpret_cast<u32*>(a.fetched) + row_of(published) / r.counted;
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        }
    }

    MOECOMM_FN void run(Wanted wanted) {
        fence_async();  // the homes' rows were written before the dispatch
        while (loaded - stored < kFetchSlots && load(wanted)) {
        }
        while (stored < loaded) {
            store();
            bulk_wait_read<0>();
            load(wanted);
            bulk_wait<1>();
            publish(stored - 1);
        }
        bulk_wait<0>();
        publish(stored);
    }
};

// By all threads of a block, once earlier kernels have been awaited.  The first `together` rows are claimed by all blocks, a warp one, as
// they get to them, so that those which run have the first.  The first `fetchers` blocks then fetch what nobody has claimed, and the rest.
// Rows come by way of `room` bytes of shared memory.  No copy is under way when it returns.
template <RowConfig r, i32 room>
MOECOMM_FETCH void fetch_rows(const LayerArgs& a, FetchShared& shared, u8* memory, i32 fetchers, i32 together) {
    static_assert(r.columns_bytes() % 16 == 0, "what the GEMM has does");
    const i32 rows = layer_rows(a), first = min(rows, together), block = blockIdx.x, blocks = gridDim.x, warp = warp_id();
    Fetcher<r, room> fetcher{a, shared, memory + warp * Fetcher<r, room>::kWarpBytes, warp};
    auto wanted = Wanted::of_all(rows, first, block, blocks, warp);
    for (bool all = true;; all = false) {
        if (lane_id() == 0) fetcher.run(wanted);
        if (!all || block >= fetchers) break;
        __syncthreads();  // those that all wait for are not on their way any more
        wanted = Wanted::of_fetcher(rows, first, block, fetchers, warp, kFetchWarps);
    }
    fence_async_shared();  // the ring comes where our pieces were
    __syncthreads();
}

// By one thread: until more of the counters are full, in order, than `full`; no acquire.  False, and noted, if they do not come in time:
// all are then said to be full, and nobody gets what is made of them.
MOECOMM_FN bool await_more(const LayerArgs& a, const Arrivals& arrivals, i32& full) {
    const i32 before = full;
    const auto more = [&] {
        full = arrivals.look(before, [&](i32 counter) { return load_fresh(reinterpret_cast<const i32*>(a.fetched) + counter); });
        return full > before;
    };
    if (wait_until(deadline_of(a.ctx), more) != Waited::ok) {
        store_relaxed(reinterpret_cast<u32*>(a.late), 1);
        full = arrivals.counters();
        return false;
    }
    return true;
}
template <RowConfig r>
MOECOMM_FN Arrivals arrivals_of(const LayerArgs& a) {
    return {min(*reinterpret_cast<const i32*>(a.num_rows), a.max_rows), r.counted};
}

// For tiles: rows that are being fetched.  One thread of a block watches their counters, in order, and says in shared memory how many of
// all rows are there.  Rows that do not come in time are noted, and nobody gets what is made of them: the tiles are made all the same,
// since others wait for them.
//
// Of rows that are cast, scales are read by ordinary loads (scales.cuh): who loads them awaits the tile as well, and is behind the bulk
// stores that brought them by way of their completion (bulk_wait, which ends in a fence between the proxies), the release that counts them,
// the watcher's acquire and its release in shared memory.  They come through the first-level cache, which nobody empties for the thread
// that loads: no line of it may be there from before.  So rows have lines of their own (RowConfig::pitch), and nobody loads scales of a row
// that is not in a tile that is there.
template <RowConfig r>
struct RowsAreFetched {
    const LayerArgs& a;

    MOECOMM_FN void watch(i32& there) const {
        const Arrivals arrivals = arrivals_of<r>(a);
        for (i32 full = 0; full < arrivals.counters();) {
            await_more(a, arrivals, full);
            // Not an acquire of each counter: ptxas 13.0 then loads through a descriptor that nobody has loaded (tests/compiled.py).
            fence_gpu();
            asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(shared_address(&there)), "r"(full * arrivals.counted) : "memory");
        }
    }
    MOECOMM_FN void await(const Tile& tile, const i32& there) const {
        i32 rows;
        do {
            asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(rows) : "r"(shared_address(&there)) : "memory");
        } while (rows < tile.row + tile.rows);
        fence_async();  // they are loaded by copies
    }
};

}  // namespace moecomm
