// Fetching of rows for the first GEMM.  Some blocks fetch rows from their source ranks before they multiply, in the order in which tiles
// need them; the rest begin with GEMM tiles.  All blocks may fetch the first rows, because every block waits for these and one
// multiprocessor loads only a fraction of what the links can carry.
//
// Every expert gets its own copy of a row.  If the token's first row is already on this rank (RowDescriptor::same), and it and all rows up
// to the end of its counter are known to have arrived, it is copied from there and not over the links; fetching never waits for that.
// Fetching waits for no other block: the dispatch has ended, and source ranks keep their published rows until they have received all
// results of this round.  So every tile that waits for rows is computed eventually.
#pragma once
#include "../device/bulk.cuh"
#include "../device/lanes.cuh"
#include "../gemm/policies.cuh"
#include "../gemm/ring.cuh"
#include "layer.cuh"

// ptxas of CUDA 13.0 may omit the load of the memory descriptor in a kernel that is inlined into one function (moecomm/gpu/cubin.py).
// moecomm/gpu/loader.py then defines MOECOMM_CALLS, which makes fetching a function call.
#ifdef MOECOMM_CALLS
#define MOECOMM_FETCH __device__ __noinline__
#else
#define MOECOMM_FETCH MOECOMM_FN
#endif

namespace moecomm {

MOECOMM_FN void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Acquire and release of a word in shared memory, at block scope.
MOECOMM_FN i32 load_acquire_shared(const i32& word) {
    i32 v;
    asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(v) : "r"(shared_address(&word)) : "memory");
    return v;
}
MOECOMM_FN void store_release_shared(i32& word, i32 v) {
    asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(shared_address(&word)), "r"(v) : "memory");
}

// In a block that fetches, kFetchWarps warps fetch and one more counts their rows.  Widening warps do neither.  A warp has at most
// kFetchSlots copies in flight and kRowsOpen fetched rows that are not counted yet.
constexpr i32 kFetchWarps = (1 + kMathGroups) * kWarpgroup / kWarp - 1, kFetchSlots = 4, kRowsOpen = 32;

// Not in the memory of the ring: bytes that a copy writes where an mbarrier has been may be lost (seen on an H200; see PTX,
// mbarrier.inval).
struct FetchShared {
    static constexpr i32 kEnded = 1 << 30;

    u64 full[kFetchWarps][kFetchSlots];
    i32 come[kFetchWarps];     // rows that a warp has written; kEnded is set when it has no more
    i32 counted[kFetchWarps];  // rows of these that have been counted
    i32 known;                 // rows, from the first on, that have arrived on this rank and may be copied

    MOECOMM_FN void init() {
        for (i32 i = 0; i < kFetchWarps * kFetchSlots; ++i) barrier_init(&full[0][0] + i, 1);
        for (i32 i = 0; i < kFetchWarps; ++i) come[i] = counted[i] = 0;
        known = 0;
    }
};

// Partition of a row into pieces, which pass through `room` bytes of a warp's shared memory; all slots but one load at a time.
struct Pieces {
    i32 slots, bytes;  // bytes of a piece; the last piece of a row may have fewer

    MOECOMM_BOTH static constexpr Pieces of(i32 slots, i32 row, i32 room) {
        return {slots, align_up(ceil_div(row, ceil_div(row, room / slots / 128 * 128)), 128)};
    }
    MOECOMM_BOTH constexpr i32 loading() const { return (slots - 1) * bytes; }
    // Chooses the number of slots that keeps most bytes in flight.
    MOECOMM_BOTH static constexpr Pieces of(i32 row, i32 room) {
        Pieces best = of(2, row, room);
        for (i32 slots = 3; slots <= kFetchSlots; ++slots)
            if (const Pieces other = of(slots, row, room); other.loading() > best.loading()) best = other;
        return best;
    }
};

// Fetches rows: one lane of a fetching warp.  It loads the descriptor of the next row while the current row is in flight.
template <RowConfig r, i32 room>
struct Fetcher {
    static constexpr i32 kRoom = room / kFetchWarps / 128 * 128;
    static constexpr Pieces kCut = Pieces::of(r.bytes(), kRoom - kRowsOpen * static_cast<i32>(sizeof(i32)));
    static constexpr i32 kSlots = kCut.slots, kPiece = kCut.bytes, kPieces = ceil_div(r.bytes(), kPiece);

    const LayerArgs& a;
    FetchShared& shared;
    u8* const memory;
    const i32 warp = warp_id();
    i32 loaded = 0, stored = 0, signaled = 0;  // loaded and stored pieces; signaled rows
    u64 from = 0;                              // address of the row whose pieces are loading
    i32 next_row = 0;                          // the row after it
    RowDescriptor next{};

    // The row number of the n-th row of a warp; there is room for kRowsOpen of them.
    MOECOMM_FN static i32& nth_row(u8* memory, i32 n) { return reinterpret_cast<i32*>(memory + kSlots * kPiece)[n % kRowsOpen]; }
    MOECOMM_FN static i32 bytes_of_piece(i32 piece) { return min(kPiece, r.bytes() - piece % kPieces * kPiece); }

    MOECOMM_FN void look_ahead(Wanted& wanted) {
        next_row = wanted.next([&] { return atomicAdd(reinterpret_cast<i32*>(a.next_row), 1); });
        if (next_row < wanted.rows) next = reinterpret_cast<const RowDescriptor*>(a.descriptors)[next_row];
    }
    // Waits until the counting warp has freed a place for one more row number.  On timeout sets `failed` and returns false; this lane then
    // fetches no more rows.
    MOECOMM_FN bool await_counted(const Wanted& wanted) {
        const auto counted = [&] { return load_acquire_shared(shared.counted[warp]) > loaded / kPieces - kRowsOpen; };
        if (wait_until(deadline_of(a.ctx), counted) == Waited::ok) return true;
        store_relaxed(reinterpret_cast<u32*>(a.failed), 1);
        next_row = wanted.rows;
        return false;
    }
    // Starts to load the next piece, with its row's destination if it is the first of the row.  Returns false if there is none.
    MOECOMM_FN bool load(Wanted& wanted) {
        const i32 part = loaded % kPieces, slot = loaded % kSlots;
        if (part == 0) {
            if (next_row >= wanted.rows) return false;
            const i32 row = next_row;
            const u64 source = a.ctx.peers[next.source_rank()];
            const i32 same = next.same();
            const bool here = same >= 0 && same < load_acquire_shared(shared.known);
            from = here ? a.rows + static_cast<i64>(same) * r.pitch() : source + next.row();
            reinterpret_cast<u64*>(a.destinations)[row] = source + next.result();
            look_ahead(wanted);
            if (!await_counted(wanted)) return false;
            nth_row(memory, loaded / kPieces) = row;
        }
        bulk_load(memory + slot * kPiece, reinterpret_cast<const u8*>(from) + part * kPiece, bytes_of_piece(loaded),
                  &shared.full[warp][slot]);
        ++loaded;
        return true;
    }
    // Waits for the oldest loaded piece and starts its bulk store to the row's place.
    MOECOMM_FN void store() {
        const i32 part = stored % kPieces, slot = stored % kSlots;
        copy_wait(&shared.full[warp][slot], stored / kSlots & 1);
        u8* const to = reinterpret_cast<u8*>(a.rows) + static_cast<i64>(nth_row(memory, stored / kPieces)) * r.pitch() + part * kPiece;
        bulk_store(to, memory + slot * kPiece, bytes_of_piece(stored));
        bulk_commit();
        ++stored;
    }
    // Signals complete rows to the counting warp.  The caller has waited (bulk_wait) until all pieces before `end` were written.
    MOECOMM_FN void tell(i32 end) {
        if (end / kPieces > signaled) store_release_shared(shared.come[warp], signaled = end / kPieces);
    }

    MOECOMM_FN void run(Wanted wanted) {
        fence_async();  // orders the source ranks' rows, seen through the dispatch, before bulk loads
        look_ahead(wanted);
        for (i32 slot = 0; slot < kSlots && load(wanted); ++slot) continue;
        while (stored < loaded) {
            store();
            bulk_wait<1>();  // frees the slots of earlier pieces
            tell(stored - 1);
            if (loaded - stored < kSlots - 1) load(wanted);
        }
        bulk_wait<0>();
        signaled = stored / kPieces;
        store_release_shared(shared.come[warp], signaled | FetchShared::kEnded);
    }

    // Counts rows for the fetching warps, until these have ended: a whole warp, one lane for each.  One fence releases the rows of all
    // warps.  It takes 2 us while copies are in flight, time that a fetching warp cannot spare (2 H200s).  On timeout sets `failed`.
    MOECOMM_FN static void count(const LayerArgs& a, FetchShared& shared, u8* memory, const Arrivals& arrivals) {
        const i32 lane = lane_id(), warp = min(lane, kFetchWarps - 1);
        const bool mine = lane < kFetchWarps;
        auto* const fetched = reinterpret_cast<i32*>(a.fetched);
        Arrivals::Seen seen{};
        i32 counted = shared.counted[warp];
        const Deadline deadline = deadline_of(a.ctx);
        for (Polls polls(deadline);;) {
            const i32 word = load_acquire_shared(shared.come[warp]), come = mine ? word & ~FetchShared::kEnded : counted;
            if (__any_sync(kAllLanes, come > counted)) {
                const i32 full = arrivals.full_by(seen);
                fence_gpu();  // releases these rows, and acquires the rows of counters that were seen full
                for (; counted < come; ++counted) {
                    i32* const counter = fetched + nth_row(memory + warp * kRoom, counted) / r.counted;
                    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
                }
                if (mine) store_release_shared(shared.counted[warp], counted);
                if (lane == 0 && full > seen.first) {
                    fence_async();  // bulk loads will read them
                    store_release_shared(shared.known, full * r.counted);
                }
                seen = arrivals.ask(full, [&](i32 counter) { return load_fresh(fetched + counter); });
                polls = Polls(deadline);
            } else if (__all_sync(kAllLanes, word >= FetchShared::kEnded)) {
                break;
            } else if (__any_sync(kAllLanes, polls.pause() != Waited::ok)) {
                store_relaxed(reinterpret_cast<u32*>(a.failed), 1);
                break;
            }
        }
        if (mine) shared.come[warp] = counted;
    }
};

// Fetches a block's share of the rows.  Called by all threads of all blocks, after await_earlier_kernels().  Warps of all blocks claim the
// first `together` rows, one each, so that blocks that run have them; then the first `fetchers` blocks fetch unclaimed first rows and all
// others, through `room` bytes of shared memory.  No copy is in flight on return.  On timeout `failed` is set.  `threads`: of a block.
template <RowConfig r, i32 room, i32 threads>
MOECOMM_FETCH void fetch_rows(const LayerArgs& a, FetchShared& shared, u8* memory, i32 fetchers, i32 together) {
    static_assert(r.columns_bytes() % 16 == 0, "what the GEMM has does");
    MOECOMM_LAYER_SPAN(fetch, a.ctx, threadIdx.x == 0);
    const i32 rows = layer_rows(a), first = min(rows, together), block = blockIdx.x, blocks = gridDim.x, warp = warp_id();
    using OfRows = Fetcher<r, room>;
    OfRows fetcher{a, shared, memory + warp * OfRows::kRoom};
    auto wanted = Wanted::of_all(rows, first, block, blocks, warp);
    for (bool all = true;; all = false) {
        if (warp == kFetchWarps) {
            OfRows::count(a, shared, memory, {rows, r.counted});
        } else if ((threads == kGemmThreads || warp < kFetchWarps) && lane_id() == 0) {
            fetcher.run(wanted);
        }
        if (!all || block >= fetchers) break;
        __syncthreads();  // the first rows, which every block waits for, have arrived
        wanted = Wanted::of_fetcher(rows, first, block, fetchers, warp, kFetchWarps);
    }
    fence_async_shared();  // the ring reuses this memory
    __syncthreads();
}

// Waits until more than `full` counters, from the first on, are full, and raises `full`.  One thread; relaxed loads, so the caller
// acquires. On timeout returns false, sets `failed`, and sets `full` to all counters; results of the layer are then not sent.
MOECOMM_FN bool await_more(const LayerArgs& a, const Arrivals& arrivals, i32& full) {
    const i32 before = full;
    const auto more = [&] {
        full = arrivals.look(before, [&](i32 counter) { return load_fresh(reinterpret_cast<const i32*>(a.fetched) + counter); });
        return full > before;
    };
    if (wait_until(deadline_of(a.ctx), more) != Waited::ok) {
        store_relaxed(reinterpret_cast<u32*>(a.failed), 1);
        full = arrivals.counters();
        return false;
    }
    return true;
}
template <RowConfig r>
MOECOMM_FN Arrivals arrivals_of(const LayerArgs& a) {
    return {min(*reinterpret_cast<const i32*>(a.num_rows), a.max_rows), r.counted};
}

}  // namespace moecomm
