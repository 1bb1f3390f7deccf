// NVSHMEM: loads and stores inside our domain; puts and signals to ranks of others.  Windows are symmetric, so that our own address stands
// for a peer's.
//
// It can't be asked whether a put would wait for room, nor a put be waited for step by step: both are its own waits, which the network
// ends.
#pragma once
#include "../protocol/domains.h"
#include "../shims/shims.h"
#include "transport.cuh"

namespace moecomm {

struct Nvshmem : Lsa {
    static constexpr bool all_reachable = false;

    // A fence covers what this GPU has put by any queue, so there is one channel.
    MOECOMM_FN explicit Nvshmem(const Context& c, i32 = 0) : Lsa{c} {}

    MOECOMM_FN u64* word(u64 which) const { return local<u64>(signal_at(ctx.window, which)); }

    MOECOMM_FN i32 channels() const { return 1; }
    // Where stores reach the peer, NVSHMEM loads the source through the first-level cache, which a fence empties.
    MOECOMM_FN void put(i32 peer, u64 to, u64 from, u64 bytes) const {
        fence();
        moecomm_nvshmem_put_warp(local<u8>(to), local<u8>(from), bytes, peer);
    }
    MOECOMM_FN void add(i32 peer, u64 which, u64 amount) const {
        moecomm_nvshmem_fence();
        moecomm_nvshmem_signal_add(word(which), amount, peer);
    }
    // NVSHMEM is asked as well because it tells the GPU of what a NIC has written.
    MOECOMM_FN u64 signal_value(u64 which) const {
        const u64 value = load_acquire(word(which));
        moecomm_nvshmem_acquire_signal(word(which), value);
        return value;
    }
    MOECOMM_FN i32 has_room(i32, i32) const { return 1; }
    MOECOMM_FN void sent_begin(i32, u64*) const {}
    MOECOMM_FN i32 sent_ended(i32, const u64*) const {
        moecomm_nvshmem_quiet();
        return 1;
    }
};

}  // namespace moecomm
