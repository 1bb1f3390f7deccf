// Copy a dispatch's metadata out of the window into tensors, with zeros and -1 in rows without a token.
#pragma once
#include "args.h"
#include "padding.cuh"

namespace moecomm {

// Called by all threads of the grid: one weight, and its id, a thread.
template <class Id>
MOECOMM_FN void tidy(const TidyArgs& a) {
    const i32 thread = blockIdx.x * kPassThreads + threadIdx.x, threads = gridDim.x * kPassThreads;
    const i32 end = a.of.num_rows != 0 ? *reinterpret_cast<const i32*>(a.of.num_rows) : a.of.count;
    for (i64 i = thread; i < static_cast<i64>(a.of.count) * a.each; i += threads) {
        const i32 row = static_cast<i32>(i / a.each);
        const bool has = has_token(a.of, row, end);
        reinterpret_cast<float*>(a.to_weights)[i] = has ? reinterpret_cast<const float*>(a.weights)[i] : 0.0f;
        if (a.ids != 0) reinterpret_cast<Id*>(a.to_ids)[i] = has ? reinterpret_cast<const Id*>(a.ids)[i] : -1;
        if (i % a.each == 0) reinterpret_cast<int2*>(a.to_src)[row] = has ? reinterpret_cast<const int2*>(a.src)[row] : make_int2(-1, -1);
    }
    for (i32 i = thread; i < a.experts; i += threads) reinterpret_cast<i32*>(a.to_counts)[i] = reinterpret_cast<const i32*>(a.counts)[i];
    if (thread == 0) *reinterpret_cast<i32*>(a.to_num_rows) = *reinterpret_cast<const i32*>(a.num_rows);
}

}  // namespace moecomm
