// Conversions of a routing: between a routing map of tokens x experts, as training frameworks have it, and expert ids, with one warp a
// token; and from ids to what a table says that each means.
#pragma once
#include "../protocol/order.h"
#include "row_pass.cuh"

namespace moecomm {

// Write the ids of each token in ascending order, then -1 with weight 0. For a token with more than topk experts, the first id is
// `experts`, which is invalid.
MOECOMM_FN void ids_of_map(const MapArgs& a) {
    each_row(a.tokens, [&](i64 token) {
        const u8* const map = reinterpret_cast<const u8*>(a.map) + token * a.experts;
        const float* const dense = reinterpret_cast<const float*>(a.dense) + token * a.experts;
        i64* const ids = reinterpret_cast<i64*>(a.ids) + token * a.topk;
        float* const weights = reinterpret_cast<float*>(a.weights) + token * a.topk;
        i32 found = 0;
#pragma unroll 4
        for (i32 first = 0; first < a.experts; first += kWarp) {
            const i32 expert = first + lane_id();
            const bool chosen = expert < a.experts && map[expert] != 0;
            const u32 all = __ballot_sync(kAllLanes, chosen);
            const i32 at = found + __popc(all & lanes_below());
            if (chosen && at < a.topk) {
                ids[at] = expert;
                if (a.dense != 0) weights[at] = dense[expert];
            }
            found += __popc(all);
        }
        for (i32 k = found + lane_id(); k < a.topk; k += kWarp) {
            ids[k] = -1;
            if (a.dense != 0) weights[k] = 0.0f;
        }
        __syncwarp();
        if (found > a.topk && lane_id() == 0) ids[0] = a.experts;
    });
}

// The inverse: write weights at their experts and zeros elsewhere; ids out of range are ignored. Weights of an expert that a token has
// twice are added, in order of k.
template <class Id>
MOECOMM_FN void weights_at_experts(const MapArgs& a) {
    each_row(a.tokens, [&](i64 token) {
        float* const dense = reinterpret_cast<float*>(a.dense) + token * a.experts;
        for (i32 expert = lane_id(); expert < a.experts; expert += kWarp) dense[expert] = 0.0f;
        __syncwarp();
        const bool has = lane_id() < a.topk;
        const i64 given = has ? reinterpret_cast<const Id*>(a.ids)[token * a.topk + lane_id()] : -1;
        const i32 id = given >= 0 && given < a.experts ? static_cast<i32>(given) : -1;
        const float weight = has ? reinterpret_cast<const float*>(a.weights)[token * a.topk + lane_id()] : 0.0f;
        float sum = 0.0f;
        for (i32 k = 0; k < a.topk; ++k) {
            const float other = __shfl_sync(kAllLanes, weight, k);
            if (__shfl_sync(kAllLanes, id, k) == id) sum += other;
        }
        if (id >= 0) dense[id] = sum;
    });
}

// Ids that the table does not have stay, so that the round finds them.
template <class Id>
MOECOMM_FN void look_up(const ExpertTableArgs& a) {
    const auto* const ids = reinterpret_cast<const Id*>(a.ids);
    const auto* const table = reinterpret_cast<const Id*>(a.table);
    i64 absent = 0;
    for (i64 entry = blockIdx.x * kPassThreads + threadIdx.x; entry < a.entries; entry += gridDim.x * kPassThreads) {
        const Id id = ids[entry];
        const bool is_known = id >= 0 && id < a.experts;
        const Id meant = is_known ? table[id] : id;
        reinterpret_cast<Id*>(a.meant)[entry] = meant;
        absent += is_known && meant < 0;
    }
    absent = sum_of_warp(absent);
    if (absent > 0 && lane_id() == 0) add_relaxed(reinterpret_cast<u64*>(a.absent), static_cast<u64>(absent));
}

MOECOMM_FN void look_up_experts(const ExpertTableArgs& a) {
    if (a.id_bytes == sizeof(i64)) {
        look_up<i64>(a);
    } else {
        look_up<i32>(a);
    }
}

}  // namespace moecomm
