// A table by expert id: what each id of a routing means.
#pragma once
#include "../device/lanes.cuh"
#include "../protocol/order.h"
#include "args.h"
#include "row_pass.cuh"

namespace moecomm {

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
