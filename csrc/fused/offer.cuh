// Before the dispatch of a layer: our rows to where peers can read them, and what travels in their place.
#pragma once
#include "layer.cuh"

namespace moecomm {

constexpr i32 kOfferThreads = 512;

// Any number of blocks.
template <i32 row_bytes, i32 topk>
MOECOMM_FN void offer_rows(const LayerArgs& a) {
    constexpr i32 vectors = row_bytes / 16, together = 4;
    const i32 thread = blockIdx.x * kOfferThreads + threadIdx.x, threads = gridDim.x * kOfferThreads;
    u8* const window = reinterpret_cast<u8*>(a.ctx.peers[a.ctx.rank]);
    auto* slips = reinterpret_cast<Slip*>(a.slips);
    auto* places = reinterpret_cast<u32*>(a.places);
    for (i32 t = thread; t < a.num_tokens; t += threads) slips[t] = {a.offered + static_cast<u64>(t) * row_bytes, a.landing};
    for (i32 i = thread; i < a.num_tokens * topk; i += threads) places[i] = i;
    for (i32 i = thread; i < ceil_div(a.max_rows, kFetchRows); i += threads) reinterpret_cast<u32*>(a.fetched)[i] = 0;
    if (thread == 0) *reinterpret_cast<u32*>(a.late) = 0;
    const i64 all = static_cast<i64>(a.num_tokens) * vectors;
    for (i64 first = thread; first < all; first += static_cast<i64>(together) * threads) {
        uint4 held[together];
#pragma unroll
        for (i32 i = 0; i < together; ++i) {
            const i64 at = first + static_cast<i64>(i) * threads;
            if (at < all) held[i] = reinterpret_cast<const uint4*>(a.x + at / vectors * a.x_stride)[at % vectors];
        }
#pragma unroll
        for (i32 i = 0; i < together; ++i) {
            const i64 at = first + static_cast<i64>(i) * threads;
            if (at < all) reinterpret_cast<uint4*>(window + a.offered)[at] = held[i];
        }
    }
    fence_system();  // peers read it when they know of it
}

}  // namespace moecomm
