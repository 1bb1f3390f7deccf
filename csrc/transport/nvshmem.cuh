// Nvshmem: loads and stores inside this domain; NVSHMEM puts and signals to ranks of other domains. Windows are symmetric, so this rank's
// address names the same place at a peer. transport.cuh states who calls each method and what it orders.
//
// NVSHMEM offers no query for queue room and no completion test for a put. Both are waits inside NVSHMEM, without a deadline; the network
// ends them.
#pragma once
#include "../protocol/domains.h"
#include "../shims/shims.h"
#include "transport.cuh"

namespace moecomm {

struct Nvshmem : Lsa {
    static constexpr bool all_reachable = false;
    static constexpr i64 worth_a_message = 1024;

    // A fence covers this GPU's puts in all queues, so one channel is enough.
    MOECOMM_FN explicit Nvshmem(const Context& c, i32 = 0) : Lsa{c} {}

    MOECOMM_FN u64* word(u64 which) const { return local<u64>(signal_at(ctx.window, which)); }

    MOECOMM_FN i32 channels() const { return 1; }
    // If stores reach the peer, NVSHMEM loads the source through L1, which the fence invalidates.
    MOECOMM_FN void put(i32 peer, u64 to, u64 from, u64 bytes) const {
        fence();
        moecomm_nvshmem_put_warp(local<u8>(to), local<u8>(from), bytes, peer);
    }
    MOECOMM_FN void put_ahead(i32 peer, u64 to, u64 from, u64 bytes) const { put(peer, to, from, bytes); }
    MOECOMM_FN void add(i32 peer, u64 which, u64 amount) const {
        moecomm_nvshmem_fence();
        moecomm_nvshmem_signal_add(word(which), amount, peer);
    }
    // Two calls: the signal of NVSHMEM's put + signal covers that put alone.
    MOECOMM_FN void put_add(i32 peer, u64 to, u64 from, u64 bytes, u64 which, u64 amount) const {
        put(peer, to, from, bytes);
        __syncwarp();
        if (threadIdx.x % kWarp == 0) add(peer, which, amount);
    }
    // The call into NVSHMEM makes a NIC's writes visible to the GPU.
    MOECOMM_FN u64 signal_value(u64 which) const {
        const u64 value = load_acquire(word(which));
        moecomm_nvshmem_acquire_signal(word(which), value);
        return value;
    }
    MOECOMM_FN void set_signal(u64 which, u64 value) const { store_relaxed(word(which), value); }
    MOECOMM_FN i32 has_room(i32, i32) const { return 1; }
    MOECOMM_FN void sent_begin(i32, u64*) const {}
    MOECOMM_FN i32 sent_ended(i32, const u64*) const {
        moecomm_nvshmem_quiet();
        return 1;
    }
};

}  // namespace moecomm
