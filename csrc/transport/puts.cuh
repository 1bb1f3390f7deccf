// Puts: a put-and-signal transport over NVLink. It splits one NVLink domain into several, so that scale-out code runs without a network.
#pragma once
#include "../device/bulk.cuh"
#include "../device/packet.cuh"
#include "../protocol/domains.h"
#include "transport.cuh"

namespace moecomm {

// Shared memory of one warp: pieces of a put on their way. With loads and stores of threads, 2.5 KB of a warp are in flight in place of 11,
// and puts bound a dispatch (docs/maintainers/decisions.md).
struct PutRing {
    static constexpr i32 kSlots = 4, kAhead = 3, kBytes = 3712;  // a row of 7168 columns of 16 bits, with its head, in 4 pieces
    static_assert(kBytes % 128 == 0);
    alignas(128) u8 data[kSlots][kBytes];
    u64 full[kSlots];
    u32 used;  // pieces, of all puts; lane 0 counts them
};

// `ctx.link` is the address of u64[ranks]: the windows of all ranks, other domains included. Only this struct uses it. transport.cuh states
// who calls each method and what it orders.
struct Puts : Lsa {
    static constexpr bool all_reachable = false;
    static constexpr i64 worth_a_message = 1024;
    using Ring = PutRing;
    PutRing* ring = nullptr;

    MOECOMM_FN explicit Puts(const Context& context, i32 = 0) : Lsa{context} {}

    MOECOMM_FN static i32 channels() { return 1; }
    MOECOMM_FN u8* remote(i32 rank, u64 offset) const {
        return reinterpret_cast<u8*>(reinterpret_cast<const u64*>(ctx.link)[rank] + offset);
    }

    MOECOMM_FN static void prepare(PutRing& ring) {
        for (i32 i = 0; i < PutRing::kSlots; ++i) barrier_init(&ring.full[i], 1);
        ring.used = 0;
    }
    MOECOMM_FN void pass_through(PutRing& through) { ring = &through; }

    // Stores have been made when it returns: the bytes are visible to a reader once it sees a later `add`.
    MOECOMM_FN void put(i32 peer, u64 to, u64 from, u64 bytes) const {
        put_ahead(peer, to, from, bytes);
        settle();
    }
    MOECOMM_FN void settle() const {
        if (threadIdx.x % kWarp == 0) bulk_wait<0>();
        __syncwarp();  // orders all lanes' stores before any lane's later signal
    }
    MOECOMM_FN void put_ahead(i32 peer, u64 to, u64 from, u64 bytes) const {
        u8* there = remote(peer, to);
        i32 lane;  // re-read here, so that values derived from it are not kept in registers between puts
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
        const u8* here = local<const u8>(from);
        if ((reinterpret_cast<u64>(there) | reinterpret_cast<u64>(here) | bytes) % 16 != 0) {
            for (u64 i = lane * 8; i < bytes; i += kWarp * 8)
                store_relaxed(reinterpret_cast<u64*>(there + i), load_relaxed(reinterpret_cast<const u64*>(here + i)));
        } else if (ring == nullptr) {
            copy_lines(there, here, bytes, lane);
        } else {
            fence_async();  // what this lane wrote or acquired comes before the bulk loads
            __syncwarp();
            if (lane == 0) copy_bulk(there, here, bytes);
        }
    }
    // Copy 16-byte vectors, kBatch of a lane in flight. Called by all lanes of a warp.
    MOECOMM_FN static void copy_lines(u8* there, const u8* here, u64 bytes, i32 lane) {
        constexpr i32 kBatch = 4;
        for (u64 first = lane * 16; first < bytes; first += kBatch * kWarp * 16) {
            ulonglong2 words[kBatch];
#pragma unroll
            for (i32 i = 0; i < kBatch; ++i)
                if (first + i * kWarp * 16 < bytes) words[i] = load_line_words(here + first + i * kWarp * 16);
#pragma unroll
            for (i32 i = 0; i < kBatch; ++i)
                if (first + i * kWarp * 16 < bytes) store_line_words(there + first + i * kWarp * 16, words[i]);
        }
    }
    // Called by lane 0. Loads run ahead of stores. The last stores may still be on their way when it returns.
    MOECOMM_FN void copy_bulk(u8* there, const u8* here, u64 bytes) const {
        const i32 pieces = static_cast<i32>(ceil_div<u64>(bytes, PutRing::kBytes));
        const u32 first = ring->used;
        const auto bytes_of_piece = [&](i32 i) {
            return static_cast<i32>(min(bytes - static_cast<u64>(i) * PutRing::kBytes, static_cast<u64>(PutRing::kBytes)));
        };
        const auto load = [&](i32 i) {
            const u32 slot = (first + i) % PutRing::kSlots;
            bulk_load(ring->data[slot], here + static_cast<u64>(i) * PutRing::kBytes, bytes_of_piece(i), &ring->full[slot]);
        };
        bulk_wait_read<PutRing::kSlots - PutRing::kAhead>();  // stores of the put before, which leave one slot at least
        for (i32 i = 0; i < min(PutRing::kAhead, pieces); ++i) load(i);
        for (i32 i = 0; i < pieces; ++i) {
            if (i + PutRing::kAhead < pieces) {
                bulk_wait_read<PutRing::kSlots - PutRing::kAhead - 1>();
                load(i + PutRing::kAhead);
            }
            const u32 slot = (first + i) % PutRing::kSlots;
            copy_wait(&ring->full[slot], (first + i) / PutRing::kSlots & 1);
            bulk_store(there + static_cast<u64>(i) * PutRing::kBytes, ring->data[slot], bytes_of_piece(i));
            bulk_commit();
        }
        ring->used = first + pieces;
    }
    MOECOMM_FN void add(i32 peer, u64 which, u64 amount) const {
        add_release(reinterpret_cast<u64*>(remote(peer, signal_at(ctx.window, which))), amount);
    }
    MOECOMM_FN void put_add(i32 peer, u64 to, u64 from, u64 bytes, u64 which, u64 amount) const {
        put(peer, to, from, bytes);
        if (threadIdx.x % kWarp == 0) add(peer, which, amount);
    }
    MOECOMM_FN u64 signal_value(u64 which) const { return load_acquire(local<const u64>(signal_at(ctx.window, which))); }
    MOECOMM_FN void set_signal(u64 which, u64 value) const { store_relaxed(local<u64>(signal_at(ctx.window, which)), value); }
    MOECOMM_FN i32 has_room(i32, i32) const { return 1; }
    MOECOMM_FN void sent_begin(i32, u64*) const {}
    MOECOMM_FN i32 sent_ended(i32, const u64*) const { return 1; }  // put has read the source
};

}  // namespace moecomm
