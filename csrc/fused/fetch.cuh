// Rows for the first GEMM: some of the blocks fetch them from their source ranks before they multiply, in the order in which the tiles want
// them, while the others have begun.  The first rows, which all wait for, all may fetch: a multiprocessor takes in a fraction of what links
// give.
//
// Every expert has a copy of its own of a row.  One that is here already is copied from there, and not over the links
// (RowDescriptor::same), if the rows of its counter, and all before them, are known to have come: nobody waits for that.  Fetching waits
// for no other block: the dispatch has ended, and source ranks keep their rows until all of this round have been received there.  So every
// tile that waits for rows is made in the end.
#pragma once
#include "../device/bulk.cuh"
#include "../device/copy.cuh"
#include "../gemm/policies.cuh"
#include "../gemm/ring.cuh"
#include "layer.cuh"

// Where the compiler would leave something out of a kernel that is all one function (moecomm/jit/cubin.py), kernel_loader.py has this
// called.
#ifdef MOECOMM_CALLS
#define MOECOMM_FETCH __device__ __noinline__
#else
#define MOECOMM_FETCH MOECOMM_FN
#endif

namespace moecomm {

MOECOMM_FN void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Within a block.
MOECOMM_FN i32 load_acquire_shared(const i32& word) {
    i32 v;
    asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(v) : "r"(shared_address(&word)) : "memory");
    return v;
}
MOECOMM_FN void store_release_shared(i32& word, i32 v) {
    asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(shared_address(&word)), "r"(v) : "memory");
}

// Of a block that fetches: warps that do, and one that counts for them.  Copies of a warp, at most, and rows that have not been counted.
constexpr i32 kFetchWarps = (1 + kMathGroups) * kWarpgroup / kWarp - 1, kFetchSlots = 4, kRowsOpen = 32;

// In memory of its own: what copies bring later to where a barrier has been may be lost (seen on an H200; PTX: mbarrier.inval).
struct FetchShared {
    static constexpr i32 kEnded = 1 << 30;

    u64 full[kFetchWarps][kFetchSlots];
    i32 come[kFetchWarps];     // rows of a warp that have been written; and kEnded, when there are no more
    i32 counted[kFetchWarps];  // of these, rows that have been counted
    i32 known;                 // rows, from the first on, that may be copied from here

    MOECOMM_FN void init() {
        for (i32 i = 0; i < kFetchWarps * kFetchSlots; ++i) barrier_init(&full[0][0] + i, 1);
        for (i32 i = 0; i < kFetchWarps; ++i) come[i] = counted[i] = 0;
        known = 0;
    }
};

// How a warp brings rows, by way of `room` bytes of shared memory: piece by piece, those of all slots but one loading.
struct Pieces {
    i32 slots, bytes;  // of a piece; a row's last may have less

    MOECOMM_BOTH static constexpr Pieces of(i32 slots, i32 row, i32 room) {
        return {slots, align_up(ceil_div(row, ceil_div(row, room / slots / 128 * 128)), 128)};
    }
    MOECOMM_BOTH constexpr i32 loading() const { return (slots - 1) * bytes; }
    // As long as most bytes are loading.
    MOECOMM_BOTH static constexpr Pieces of(i32 row, i32 room) {
        Pieces best = of(2, row, room);
        for (i32 slots = 3; slots <= kFetchSlots; ++slots)
            if (const Pieces other = of(slots, row, room); other.loading() > best.loading()) best = other;
        return best;
    }
};

// One lane of a warp.  The descriptor of a row is on its way while the row before is.
template <RowConfig r, i32 room>
struct Fetcher {
    static constexpr i32 kRoom = room / kFetchWarps / 128 * 128;
    static constexpr Pieces kCut = Pieces::of(r.bytes(), kRoom - kRowsOpen * static_cast<i32>(sizeof(i32)));
    static constexpr i32 kSlots = kCut.slots, kPiece = kCut.bytes, kPieces = ceil_div(r.bytes(), kPiece);

    const LayerArgs& a;
    FetchShared& shared;
    u8* const memory;
    const i32 warp = warp_id();
    i32 loaded = 0, stored = 0, signaled = 0;  // pieces; rows
    u64 from = 0;                              // the row whose pieces are loading
    i32 next_row = 0;                          // after it
    RowDescriptor next{};

    // The n-th row of a warp.
    MOECOMM_FN static i32& nth_row(u8* memory, i32 n) { return reinterpret_cast<i32*>(memory + kSlots * kPiece)[n % kRowsOpen]; }
    MOECOMM_FN static i32 bytes_of_piece(i32 piece) { return min(kPiece, r.bytes() - piece % kPieces * kPiece); }

    MOECOMM_FN void look_ahead(Wanted& wanted) {
        next_row = wanted.next([&] { return atomicAdd(reinterpret_cast<i32*>(a.next_row), 1); });
        if (next_row < wanted.rows) next = reinterpret_cast<const RowDescriptor*>(a.descriptors)[next_row];
    }
    // Until there is a place for the number of one more row.  If that does not come in time, this lane fetches no more.
    MOECOMM_FN bool await_counted(const Wanted& wanted) {
        const auto counted = [&] { return load_acquire_shared(shared.counted[warp]) > loaded / kPieces - kRowsOpen; };
        if (wait_until(deadline_of(a.ctx), counted) == Waited::ok) return true;
        store_relaxed(reinterpret_cast<u32*>(a.failed), 1);
        next_row = wanted.rows;
        return false;
    }
    // The next piece; false where that is of another row, and there is none.
    MOECOMM_FN bool load(Wanted& wanted) {
        const i32 part = loaded % kPieces, slot = loaded % kSlots;
        if (part == 0) {
            if (next_row >= wanted.rows) return false;
            const i32 row = next_row;
            const u64 source = a.ctx.peers[next.source_rank()];
            const i32 same = next.same();
            const bool here = same >= 0 && same < load_acquire_shared(shared.known);
            from = here ? a.rows + static_cast<i64>(same) * r.pitch() : source + next.row();
            reinterpret_cast<u64*>(a.destinations)[row] = source + next.receive_buffer();
            look_ahead(wanted);
            if (!await_counted(wanted)) return false;
            nth_row(memory, loaded / kPieces) = row;
        }
        bulk_load(memory + slot * kPiece, reinterpret_cast<const u8*>(from) + part * kPiece, bytes_of_piece(loaded),
                  &shared.full[warp][slot]);
        ++loaded;
        return true;
    }
    MOECOMM_FN void store() {
        const i32 part = stored % kPieces, slot = stored % kSlots;
        copy_wait(&shared.full[warp][slot], stored / kSlots & 1);
        u8* const to = reinterpret_cast<u8*>(a.rows) + static_cast<i64>(nth_row(memory, stored / kPieces)) * r.pitch() + part * kPiece;
        bulk_store(to, memory + slot * kPiece, bytes_of_piece(stored));
        bulk_commit();
        ++stored;
    }
    // All pieces before `end` have been written: bulk_wait.
    MOECOMM_FN void tell(i32 end) {
        if (end / kPieces > signaled) store_release_shared(shared.come[warp], signaled = end / kPieces);
    }

    MOECOMM_FN void run(Wanted wanted) {
        fence_async();  // the source ranks' rows were written before the dispatch
        look_ahead(wanted);
        for (i32 slot = 0; slot < kSlots && load(wanted); ++slot) continue;
        while (stored < loaded) {
            store();
            bulk_wait<1>();  // the slots of those before are free
            tell(stored - 1);
            if (loaded - stored < kSlots - 1) load(wanted);
        }
        bulk_wait<0>();
        signaled = stored / kPieces;
        store_release_shared(shared.come[warp], signaled | FetchShared::kEnded);
    }

    // By a warp beside those that fetch, a lane for each: until these have ended, counts their rows, those of all with one fence.  It takes
    // 2 us while copies are under way, which who fetches does not have (2 H200s).
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
                fence_gpu();  // a release of these rows, and an acquire of those that have been seen
                for (; counted < come; ++counted) {
                    i32* const counter = fetched + nth_row(memory + warp * kRoom, counted) / r.counted;
                    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
                }
                if (mine) store_release_shared(shared.counted[warp], counted);
                if (lane == 0 && full > seen.first) {
                    fence_async();  // they are loaded by copies
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

// By all threads of a block, once earlier kernels have been awaited.  The first `together` rows are claimed by all blocks, a warp one, as
// they get to them, so that those which run have the first.  The first `fetchers` blocks then fetch what nobody has claimed, and the rest.
// Rows come by way of `room` bytes of shared memory.  No copy is under way when it returns.
template <RowConfig r, i32 room>
MOECOMM_FETCH void fetch_rows(const LayerArgs& a, FetchShared& shared, u8* memory, i32 fetchers, i32 together) {
    static_assert(r.columns_bytes() % 16 == 0, "what the GEMM has does");
    const i32 rows = layer_rows(a), first = min(rows, together), block = blockIdx.x, blocks = gridDim.x, warp = warp_id();
    using OfRows = Fetcher<r, room>;
    OfRows fetcher{a, shared, memory + warp * OfRows::kRoom};
    auto wanted = Wanted::of_all(rows, first, block, blocks, warp);
    for (bool all = true;; all = false) {
        if (warp == kFetchWarps) {
            OfRows::count(a, shared, memory, {rows, r.counted});
        } else if (lane_id() == 0) {
            fetcher.run(wanted);
        }
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
