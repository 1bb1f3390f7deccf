// Link ceiling: every rank moves bytes to or from all others at once, in long streams, with no other work.
#pragma once
#include "../device/bulk.cuh"

namespace moecomm::bench {

enum class Method { store, load, bulk_write, bulk_read };

MOECOMM_BOTH constexpr bool writes(Method method) { return method == Method::store || method == Method::bulk_write; }

// moecomm_bench/ceiling.py fills it.
struct AllToAllArgs {
    u64 blocks[kMaxRanks];  // by rank: memory of `ranks` parts in its window
    u64 local;              // memory of `ranks` parts on this rank
    i64 bytes;              // of a part: a multiple of kPiece
    i32 rank, ranks;
};
static_assert(sizeof(AllToAllArgs) == 8 * kMaxRanks + 24, "as ceiling.py packs it");

constexpr i32 kPiece = 8192, kSlots = 4, kMovers = 6;  // bytes of a bulk copy, pieces in a warp's ring, warps of a block

// Writing copies the local part for `peer` to part `rank` of the peer's block; reading copies part `rank` of the peer's block to the local
// part for `peer`.
template <Method method>
MOECOMM_FN const u8* source(const AllToAllArgs& a, i32 peer, i64 offset) {
    const u64 at = writes(method) ? a.local + peer * a.bytes : a.blocks[peer] + a.rank * a.bytes;
    return reinterpret_cast<const u8*>(at + offset);
}
template <Method method>
MOECOMM_FN u8* target(const AllToAllArgs& a, i32 peer, i64 offset) {
    const u64 at = writes(method) ? a.blocks[peer] + a.rank * a.bytes : a.local + peer * a.bytes;
    return reinterpret_cast<u8*>(at + offset);
}
MOECOMM_FN i32 peer_of(const AllToAllArgs& a, i32 turn) { return (a.rank + 1 + turn) % a.ranks; }

MOECOMM_FN uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Called by all threads: 16-byte loads and stores, `depth` of a thread in flight, one peer after the other.
template <Method method>
MOECOMM_FN void move_vectors(const AllToAllArgs& a) {
    constexpr i32 depth = 8;
    const i64 vectors = a.bytes / 16, each = ceil_div<i64>(vectors, gridDim.x);
    const i64 begin = each * blockIdx.x, end = min(begin + each, vectors);
    for (i32 turn = 0; turn < a.ranks - 1; ++turn) {
        const auto* from = reinterpret_cast<const uint4*>(source<method>(a, peer_of(a, turn), 0));
        auto* to = reinterpret_cast<uint4*>(target<method>(a, peer_of(a, turn), 0));
        for (i64 first = begin + threadIdx.x; first < end; first += depth * blockDim.x) {
            uint4 held[depth];
#pragma unroll
            for (i32 i = 0; i < depth; ++i)
                if (first + i * blockDim.x < end) held[i] = load_once(from + first + i * blockDim.x);
#pragma unroll
            for (i32 i = 0; i < depth; ++i)
                if (first + i * blockDim.x < end) to[first + i * blockDim.x] = held[i];
        }
    }
}

// Called by all threads; one lane of each warp moves pieces through a ring in shared memory, rotating over the peers.
template <Method method>
MOECOMM_FN void move_bulk(const AllToAllArgs& a) {
    extern __shared__ __align__(128) u8 shared[];
    const i32 warp = threadIdx.x / kWarp;
    if (threadIdx.x % kWarp != 0) return;
    u8* ring = shared + warp * kSlots * kPiece;
    u64* loaded = reinterpret_cast<u64*>(shared + kMovers * kSlots * kPiece) + warp * kSlots;
    for (i32 slot = 0; slot < kSlots; ++slot) barrier_init(loaded + slot, 1);
    barrier_init_done();

    const i64 pieces = a.bytes / kPiece, movers = gridDim.x * kMovers, mover = blockIdx.x * kMovers + warp;
    const i32 peers = a.ranks - 1;
    const i64 steps = mover < pieces ? ceil_div<i64>(pieces - mover, movers) * peers : 0;
    const auto offset = [&](i64 step) { return (mover + step / peers * movers) * kPiece; };
    const auto peer = [&](i64 step) { return peer_of(a, static_cast<i32>(step % peers)); };
    constexpr i32 ahead = kSlots - 1;
    for (i64 step = 0; step < steps + ahead; ++step) {
        if (step < steps) {
            if (step >= kSlots) bulk_wait_read<0>();
            const i32 slot = static_cast<i32>(step % kSlots);
            bulk_load(ring + slot * kPiece, source<method>(a, peer(step), offset(step)), kPiece, loaded + slot);
        }
        if (const i64 ready = step - ahead; ready >= 0) {
            const i32 slot = static_cast<i32>(ready % kSlots);
            copy_wait(loaded + slot, static_cast<u32>(ready / kSlots) & 1);
            bulk_store(target<method>(a, peer(ready), offset(ready)), ring + slot * kPiece, kPiece);
            bulk_commit();
        }
    }
    bulk_wait<0>();
}

// Kernel body, called by all threads. Stores are complete when the kernel ends; nothing else is ordered.
template <Method method>
MOECOMM_FN void all_to_all(const AllToAllArgs& a) {
    if constexpr (method == Method::store || method == Method::load) {
        move_vectors<method>(a);
    } else {
        move_bulk<method>(a);
    }
}

}  // namespace moecomm::bench
