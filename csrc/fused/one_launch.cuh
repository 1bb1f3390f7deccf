// Both GEMMs of a layer in one launch: rows are fetched while the first has begun, and go home while either is under way.
//
// Positions of tiles (lagged.h) are taken from a counter, by whole clusters, as they get to them: those that fetch before they multiply
// take none meanwhile.  So are the first rows that are fetched.  In a block
//   the dealer     a thread: finds the next tile, waits for what it is made of, and deals it to the others,
//   the loader     a thread, of e4m3 and a warp for scales: fill the ring (gemm.cuh),
//   warpgroups     empty it, and store the tile: of the first product here, of the second at its home,
//   the teller     a thread: counts, for all blocks, that the tile has been stored.
// What somebody stores here and somebody else loads: see `deal` and `tell`.
#pragma once
#include "../gemm/gemm.cuh"
#include "dealt.cuh"
#include "fetch.cuh"
#include "send.cuh"

namespace moecomm {

struct OneLaunchArgs {
    GemmArgs first, second;  // of the same rows, row tiles and bands; the second's x is the first's out
    LayerArgs layer;
    i32 fetchers;   // blocks, the first ones, that fetch before they multiply
    i32 together;   // rows that all blocks fetch before that, a warp one
    i32 lag, turn;  // LaggedWalk
};
static_assert(sizeof(OneLaunchArgs) <= 4096 && sizeof(OneLaunchArgs) % sizeof(u64) == 0, "what a kernel takes");

// The second GEMM of a layer whose first is `c`.  All but the epilogue, and how weights lie in memory, is the same.
MOECOMM_BOTH constexpr GemmConfig second_of(GemmConfig c, Type out) {
    c.swiglu = c.apart = false;
    c.out = out;
    return c;
}

template <GemmConfig c>
struct OneShared {
    GemmShared<c> gemm;
    DealtShared<c> dealt;
    FetchShared fetch;
};

// By the dealer: what a tile is made of.  Where that does not come in time, tiles are dealt all the same, since others wait for them, but
// none of the second product is sent: where its rows go is not known before they have been fetched.  Whoever gives up says so (`late`)
// before he deals a tile, and so before it counts as made: who waits for it can't miss it.
template <RowConfig r>
struct Awaited {
    const OneLaunchArgs& args;
    i32 full = 0;  // of the counters of fetched rows
    bool lost = false;

    MOECOMM_FN void fetched(const Tile& tile) {
        const Arrivals arrivals = arrivals_of<r>(args.layer);
        const i32 wanted = tile.row + tile.rows, before = full;
        while (!lost && full * arrivals.counted < wanted) {
            if (full < arrivals.counters()) {
                lost = !await_more(args.layer, arrivals, full);
            } else {  // a dispatch that has failed may have left any counts
                store_relaxed(reinterpret_cast<u32*>(args.layer.late), 1);
                lost = true;
            }
        }
        // Those of the first tile, which nothing hides, together.  Later a fence would be one for rows on their way home as well.
        if (before == 0) {
            fence_gpu();
        } else {
            for (i32 i = before; i < full; ++i) load_acquire(reinterpret_cast<const u32*>(args.layer.fetched) + i);
        }
    }
    template <GemmConfig c>
    MOECOMM_FN void made(const Tile& tile) {
        const LayerArgs& a = args.layer;
        const i32 wanted = args.first.grouping.column_tiles * c.cluster;
        const auto all = [&] { return load_fresh(reinterpret_cast<const i32*>(a.made) + tile.nth) >= wanted; };
        if (!lost && wait_until(deadline_of(a.ctx), all) != Waited::ok) store_relaxed(reinterpret_cast<u32*>(a.late), 1);
        load_acquire(reinterpret_cast<const u32*>(a.made) + tile.nth);
        lost = lost || load_relaxed(reinterpret_cast<const u32*>(a.late)) != 0;
    }
};

// One thread: the dealer.  It has seen complete, with acquires, what a tile is made of, and its arrival at `full` is a release: so have the
// others of the block, through their wait.  Copies of theirs take a fence between the proxies as well, which is one for all that is on its
// way, and takes as long: the dealer's, who is a tile ahead, and neither theirs nor that of the threads that stored.
template <GemmConfig c, RowConfig r>
MOECOMM_FN void deal(OneShared<c>& s, const OneLaunchArgs& args) {
    const RowTiles rows = TileWalk::count_rows<c.most_rows>(args.first.grouping, s.gemm.counts);
    s.dealt.walk = LaggedWalk(args.first.grouping, args.second.grouping, s.gemm.counts, rows, args.lag, args.turn);
    Awaited<r> awaited{args};
    for (DealtPlace place;; place.step()) {
        copy_wait(&s.dealt.empty[place.slot], place.phase ^ 1);
        Dealt& next = s.dealt.tiles[place.slot];
        const i32 position = take_position(s.dealt, reinterpret_cast<u32*>(args.layer.taken), place);
        bool second;
        const bool found = s.dealt.walk.find(position, next.tile, second);
        next.product = !found ? Dealt::none : second ? Dealt::second : Dealt::first;
        if (found && second) {
            awaited.template made<c>(next.tile);
        } else if (found) {
            awaited.fetched(next.tile);
        }
        next.lost = awaited.lost;
        fence_async();
        arrive(&s.dealt.full[place.slot]);
        if (!found) return;
    }
}

// One thread: the loader.
template <GemmConfig c>
MOECOMM_FN void load_dealt(OneShared<c>& s, const OneLaunchArgs& args) {
    const i32 rank = place_in_cluster<c>();
    RingPlace<c> place;
    for_dealt(s.dealt, [&](const Dealt& now, const DealtPlace& at) {
        const Tile tile = now.tile;  // once: not again for every step
        if (now.product == Dealt::first) {
            load_tile<c, c.apart>(s.gemm, args.first, tile, rank, place);
        } else {
            load_tile<c, false>(s.gemm, args.second, tile, rank, place);
        }
        arrive(&s.dealt.empty[at.slot]);
    });
}

// A warp.  Scales come through the first-level cache: see RowsAreFetched.  Those of the first product have lines of memory of their own for
// every row, as fetched rows have theirs, and nobody loads any of a row before all columns of its row tile are made.
template <GemmConfig c, GemmConfig product>
MOECOMM_FN void load_dealt_scales(OneShared<c>& s, const OneLaunchArgs& args) {
    const i32 rank = place_in_cluster<c>();
    RingPlace<c> place;
    for_dealt(s.dealt, [&](const Dealt& now, const DealtPlace& at) {
        const Tile tile = now.tile;
        if (now.product == Dealt::first) {
            load_scales_of<c, c>(s.gemm, args.first, tile, rank, place);
        } else {
            load_scales_of<c, product>(s.gemm, args.second, tile, rank, place);
        }
        __syncwarp();
        if (lane_id() == 0) arrive(&s.dealt.empty[at.slot]);
    });
}

// One thread: the teller.  What the warpgroups have stored it has seen complete through their arrivals at `stored`; its own release covers
// that.  They need not wait for it.
template <GemmConfig c>
MOECOMM_FN void tell(OneShared<c>& s, const OneLaunchArgs& args) {
    for_dealt(s.dealt, [&](const Dealt& now, const DealtPlace& at) {
        copy_wait(&s.dealt.stored[at.slot], at.phase);
        if (now.product == Dealt::first) {
            u32* const counter = reinterpret_cast<u32*>(args.layer.made) + now.tile.nth;
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        }
        arrive(&s.dealt.empty[at.slot]);
    });
}

// Where the first product goes: scales of its rows as far apart as the second GEMM wants them.
template <GemmConfig c>
MOECOMM_FN auto store_between(const OneLaunchArgs& args) {
    const i32 columns = args.second.depth;
    if constexpr (c.out == Type::e4m3) {
        return StoreCastRows{args.first.out, args.first.out_scales, columns, args.second.x_scale_row};
    } else {
        return StoreRows{args.first.out, columns};
    }
}

// A warpgroup: empties the ring, and stores the tiles.
template <GemmConfig c, RowConfig r, GemmConfig product>
MOECOMM_FN void make_dealt(OneShared<c>& s, const OneLaunchArgs& args) {
    const i32 math_group = threadIdx.x / kWarpgroup - 1;
    const u32 staging = shared_address(s.gemm.staging);
    RingPlace<c> place;
    u32 turns = 0;
    float accum[c.parts()][c.most_rows / 2] = {};
    for_dealt(s.dealt, [&](const Dealt& now, const DealtPlace& at) {
        const i32 depth = now.product == Dealt::first ? args.first.depth : args.second.depth;
        multiply_padded<c>(s.gemm, place, math_group, ceil_div(depth, c.depth()), now.tile.padded, accum);
        const Tile tile = now.tile;  // once: nothing is kept in registers across a store
        if (now.product == Dealt::first) {
            store_accum<c>(accum, tile, math_group, args.second.depth, staging, turns, store_between<c>(args));
            // Both warpgroups cast what either has turned; the second product they turn each for itself, and in the same places.
            if constexpr (c.swapped && c.out == Type::e4m3) sync_threads(1 + kMathGroups, kMathGroups * kWarpgroup);
        } else if (!now.lost) {
            // Where a row goes is read through the first-level cache as well.  A line of that belongs to rows of one counter, all of which
            // had been fetched before any of them was multiplied.
            static_assert(r.counted * sizeof(u64) % 128 == 0, "whole lines");
            store_accum<product>(accum, tile, math_group, args.second.columns, staging, turns, StoreAtSourceRank{args.layer});
        }
        __syncwarp();
        if (lane_id() == 0) arrive(&s.dealt.stored[at.slot]);
    });
}

// A launch of whole clusters: what our experts make of the rows that they get, of c.type, sent home as `out`.
template <GemmConfig c, RowConfig r, Type out>
MOECOMM_FN void fetch_multiply_and_send(const OneLaunchArgs& args) {
    static_assert(r.type == c.type, "rows are multiplied as they come");
    static_assert(sizeof(OneShared<c>) <= c.shared_bytes, "kernels.py bounds it");
    extern __shared__ __align__(1024) u8 memory[];
    auto& s = *reinterpret_cast<OneShared<c>*>(memory);
    if (threadIdx.x == 0) {
        prefetch_map(args.first.w);
        prefetch_map(args.second.w);
        for (const TensorMap& map : args.first.x) prefetch_map(map);
        for (const TensorMap& map : args.second.x) prefetch_map(map);
        s.fetch.init();
        s.gemm.barriers.init();
        s.dealt.init();
        barrier_init_done();
    }
    __syncthreads();
    await_earlier_kernels();
    // By warps that do not fetch in most blocks.
    const auto* counts = reinterpret_cast<const i32*>(args.first.counts);
    for (i32 g = threadIdx.x - kWarpgroup; g >= 0 && g < args.first.grouping.groups; g += kMathGroups * kWarpgroup)
        s.gemm.counts[g] = counts[g];
    fetch_rows<r, GemmShared<c>::room()>(args.layer, s.fetch, memory, args.fetchers, args.together);
    if (blockIdx.x == 0 && threadIdx.x == 0) note_failure(args.layer);
    let_next_kernel_launch();
    if constexpr (c.cluster > 1) sync_cluster<c.cluster>();
    constexpr GemmConfig product = second_of(c, out);
    if (threadIdx.x < kWarpgroup) {
        leave_registers<kLoaderRegisters>();
        if (threadIdx.x == 0) load_dealt(s, args);
        if (threadIdx.x == kWarp) deal<c, r>(s, args);
        if constexpr (c.scaled()) {
            if (warp_id() == 2) load_dealt_scales<c, product>(s, args);
        }
        if (threadIdx.x == 3 * kWarp) tell(s, args);
    } else {
        take_registers<kMathRegisters>();
        make_dealt<c, r, product>(s, args);
        StoreAtSourceRank{args.layer}.end();
    }
    if constexpr (c.cluster > 1) sync_cluster<c.cluster>();  // what others load for us, and their arrivals, must find us here
}

}  // namespace moecomm
