// Rows for the first GEMM: some of the blocks fetch them from their homes before they multiply, in the order in which the tiles want them,
// while the others have begun.
//
// Every row is fetched for every expert that wants it.  Fetching waits for nobody: the dispatch has ended, and homes keep their rows until
// all of this round have landed there.  So every tile that waits for rows is made in the end.
#pragma once
#include "../device/bulk.cuh"
#include "../device/copy.cuh"
#include "layer.cuh"
#include "policies.cuh"
#include "ring.cuh"

namespace moecomm {

constexpr i32 kFetchWarps = (1 + kMathGroups) * kWarpgroup / kWarp, kFetchSlots = 2;
MOECOMM_BOTH constexpr i32 fetch_piece(i32 row_bytes, i32 shared_bytes) {
    const i32 room = (shared_bytes - 1024) / (kFetchWarps * kFetchSlots) / 128 * 128, pieces = ceil_div(row_bytes, room);
    return align_up(ceil_div(row_bytes, pieces), 128);
}

template <RowConfig r, i32 shared_bytes>
struct FetchShared {
    static constexpr i32 kPiece = fetch_piece(r.bytes(), shared_bytes), kPieces = ceil_div(r.bytes(), kPiece);
    alignas(128) u8 data[kFetchWarps][kFetchSlots][kPiece];
    u64 full[kFetchWarps][kFetchSlots];
};

// One lane of a warp: every `step`-th row, piece by piece, a piece loading while another is stored.
template <RowConfig r, i32 shared_bytes>
struct Fetcher {
    using Shared = FetchShared<r, shared_bytes>;
    static constexpr i32 kPieces = Shared::kPieces;

    const LayerArgs& a;
    Shared& shared;
    const i32 warp, first, step, rows;
    u64 from = 0;  // the row whose pieces are loading

    MOECOMM_FN i32 row_of(i32 piece) const { return first + piece / kPieces * step; }
    MOECOMM_FN static i32 bytes_of_piece(i32 piece) { return min(Shared::kPiece, r.bytes() - piece % kPieces * Shared::kPiece); }

    MOECOMM_FN bool load(i32 piece) {
        const i32 row = row_of(piece);
        if (row >= rows) return false;
        if (piece % kPieces == 0) {
            const Slip slip = reinterpret_cast<const Slip*>(a.slips)[row];
            const u64 home = a.ctx.peers[slip.home()];
            from = home + slip.row;
            reinterpret_cast<u64*>(a.homes)[row] = home + slip.landing();
        }
        bulk_load(shared.data[warp][piece % kFetchSlots], reinterpret_cast<const u8*>(from) + piece % kPieces * Shared::kPiece,
                  bytes_of_piece(piece), &shared.full[warp][piece % kFetchSlots]);
        return true;
    }
    MOECOMM_FN void store(i32 piece) const {
        copy_wait(&shared.full[warp][piece % kFetchSlots], piece / kFetchSlots & 1);
        u8* const to = reinterpret_cast<u8*>(a.rows) + static_cast<i64>(row_of(piece)) * r.pitch() + piece % kPieces * Shared::kPiece;
        bulk_store(to, shared.data[warp][piece % kFetchSlots], bytes_of_piece(piece));
        bulk_commit();
    }
    // The stores up to this piece have been written: bulk_wait.
    MOECOMM_FN void publish(i32 piece) const {
        if (piece < 0 || piece % kPieces != kPieces - 1) return;
        u32* const counter = reinterpret_cast<u32*>(a.fetched) + row_of(piece) / kFetchRows;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    }

    MOECOMM_FN void run() {
        fence_async();  // the homes' rows were written before the dispatch
        i32 loaded = 0, stored = 0;
        while (loaded < kFetchSlots && load(loaded)) ++loaded;
        for (; stored < loaded; ++stored) {
            store(stored);
            bulk_wait<1>();
            publish(stored - 1);
            bulk_wait_read<0>();
            if (load(loaded)) ++loaded;
        }
        bulk_wait<0>();
        publish(stored - 1);
    }
};

// By all threads of a block that fetches, `fetchers` of them: no copy is under way when it returns.
template <RowConfig r, i32 shared_bytes>
MOECOMM_FN void fetch_rows(const LayerArgs& a, i32 fetchers) {
    extern __shared__ __align__(1024) u8 memory[];
    using Shared = FetchShared<r, shared_bytes>;
    static_assert(sizeof(Shared) <= shared_bytes && r.columns_bytes() % 16 == 0, "what the GEMM has does");
    auto& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (i32 i = 0; i < kFetchWarps * kFetchSlots; ++i) barrier_init(&shared.full[0][0] + i, 1);
        barrier_init_done();
    }
    __syncthreads();
    if (lane_id() == 0) {
        const i32 rows = layer_rows(a);
        Fetcher<r, shared_bytes>{a, shared, warp_id(), static_cast<i32>(blockIdx.x) + fetchers * warp_id(), fetchers * kFetchWarps, rows}
            .run();
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
MOECOMM_FN Arrivals arrivals_of(const LayerArgs& a) { return {min(*reinterpret_cast<const i32*>(a.num_rows), a.max_rows)}; }

// For tiles: rows that are being fetched.  One thread of a block watches their counters, in order, and says in shared memory how many of
// all rows are there.  Rows that do not come in time are noted, and nobody gets what is made of them: the tiles are made all the same,
// since others wait for them.
//
// Of rows that are cast, scales are read by ordinary loads (scales.cuh): who loads them awaits the tile as well, and is behind the bulk
// stores that brought them by way of their completion (bulk_wait, which ends in a fence between the proxies), the release that counts them,
// the watcher's acquire and its release in shared memory.  They come through the first-level cache, which nobody empties for the thread
// that loads: no line of it may be there from before.  So rows have lines of their own (RowConfig::pitch), and nobody loads scales of a row
// that is not in a tile that is there.
struct RowsAreFetched {
    const LayerArgs& a;

    MOECOMM_FN void watch(i32& there) const {
        const Arrivals arrivals = arrivals_of(a);
        for (i32 full = 0; full < arrivals.counters();) {
            await_more(a, arrivals, full);
            // Not an acquire of each counter: ptxas 13.0 then loads through a descriptor that nobody has loaded (tests/compiled.py).
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(shared_address(&there)), "r"(full * kFetchRows) : "memory");
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
