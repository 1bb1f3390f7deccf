// Puts: a put-and-signal transport over NVLink. It splits one NVLink domain into several, so that scale-out code runs without a network.
#pragma once
#include "../device/packet.cuh"
#include "../protocol/domains.h"
#include "transport.cuh"

namespace moecomm {

// `ctx.link` is the address of u64[ranks]: the windows of all ranks, other domains included. Only this struct uses it. transport.cuh states
// who calls each method and what it orders.
struct Puts : Lsa {
    static constexpr bool all_reachable = false;
    static constexpr i64 worth_a_message = 1024;

    MOECOMM_FN explicit Puts(const Context& context, i32 = 0) : Lsa{context} {}

    MOECOMM_FN static i32 channels() { return 1; }
    MOECOMM_FN u8* remote(i32 rank, u64 offset) const {
        return reinterpret_cast<u8*>(reinterpret_cast<const u64*>(ctx.link)[rank] + offset);
    }

    // Relaxed stores: the bytes are visible to a reader once it sees a later `add`.
    MOECOMM_FN void put(i32 peer, u64 to, u64 from, u64 bytes) const {
        u8* there = remote(peer, to);
        i32 lane;  // re-read here, so that values derived from it are not kept in registers between puts
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
        const u8* here = local<const u8>(from);
        if ((reinterpret_cast<u64>(there) | reinterpret_cast<u64>(here) | bytes) % 16 != 0) {
            for (u64 i = lane * 8; i < bytes; i += kWarp * 8)
                store_relaxed(reinterpret_cast<u64*>(there + i), load_relaxed(reinterpret_cast<const u64*>(here + i)));
        } else {
            copy_lines(there, here, bytes, lane);
        }
        __syncwarp();  // orders all lanes' stores before any lane's later signal
    }
    // Copy 16-byte vectors, kBatch of a lane in flight. Called by all lanes of a warp.
    MOECOMM_FN static void copy_lines(u8* there, const u8* here, u64 bytes, i32 lane) {
        constexpr i32 kBatch = 5;  // with more, combine spills registers
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
    MOECOMM_FN void add(i32 peer, u64 which, u64 amount) const {
        add_release(reinterpret_cast<u64*>(remote(peer, signal_at(ctx.window, which))), amount);
    }
    MOECOMM_FN void put_add(i32 peer, u64 to, u64 from, u64 bytes, u64 which, u64 amount) const {
        put(peer, to, from, bytes);
        if (threadIdx.x % kWarp == 0) add(peer, which, amount);
    }
    MOECOMM_FN u64 signal_value(u64 which) const { return load_acquire(local<const u64>(signal_at(ctx.window, which))); }
    MOECOMM_FN i32 has_room(i32, i32) const { return 1; }
    MOECOMM_FN void sent_begin(i32, u64*) const {}
    MOECOMM_FN i32 sent_ended(i32, const u64*) const { return 1; }  // put has read the source
};

}  // namespace moecomm
