// The end of a layer at a token's home: what its experts have made is weighted and added up, in the order of the ranks and, of a rank, of
// k, each rank's part by itself: the bits of a combine whose parts travel in fp32.
#pragma once
#include "../device/cast.cuh"
#include "../device/copy.cuh"
#include "layer.cuh"

namespace moecomm {

constexpr i32 kHomeThreads = 512;

struct HomeConfig {
    Type type;  // of rows, bias and out
    i32 hidden, topk;
};

// By a warp: the n-th entry of the token, in the order in which they are added, in lane n.
struct Entries {
    i32 count, k, owner;
    float weight;
};
template <HomeConfig h>
MOECOMM_FN Entries entries_of(const LayerArgs& a, i32 token) {
    const i32 lane = lane_id(), at = token * h.topk + lane;
    i32 owner = -1;
    float weight = 1.0f;
    if (lane < h.topk) {
        owner = reinterpret_cast<const i32*>(a.owners)[at];
        if (a.weights != 0) weight = reinterpret_cast<const float*>(a.weights)[at];
    }
    i32 before = 0;  // ours, in that order
#pragma unroll
    for (i32 k = 0; k < h.topk; ++k) {
        const i32 other = __shfl_sync(kAllLanes, owner, k);
        if (other >= 0 && (other < owner || (other == owner && k < lane))) ++before;
    }
    Entries e{__popc(__ballot_sync(kAllLanes, owner >= 0)), -1, -1, 0.0f};
#pragma unroll
    for (i32 k = 0; k < h.topk; ++k) {
        const i32 of = __shfl_sync(kAllLanes, owner, k), place = __shfl_sync(kAllLanes, before, k);
        const float w = __shfl_sync(kAllLanes, weight, k);
        if (of >= 0 && place == lane) e = {e.count, k, of, w};
    }
    return e;
}

// By a warp: some columns of a token, 8 a lane.
template <HomeConfig h>
MOECOMM_FN void add_columns(const LayerArgs& a, i32 token, const Entries& e, i32 vector) {
    constexpr i32 kColumns = 8, kTogether = 8, kRowBytes = h.hidden * 2;
    const bool has = vector < h.hidden / kColumns;
    const u8* const landed =
        reinterpret_cast<const u8*>(a.ctx.peers[a.ctx.rank] + a.landing) + static_cast<i64>(token) * h.topk * kRowBytes + vector * 16;
    float sum[kColumns] = {}, part[kColumns] = {};
    i32 of = -1;  // whose part it is
    const auto end_part = [&] {
#pragma unroll
        for (i32 i = 0; i < kColumns; ++i) {
            sum[i] = __fadd_rn(sum[i], part[i]);
            part[i] = 0.0f;
        }
    };
    for (i32 first = 0; first < e.count; first += kTogether) {
        uint4 held[kTogether];
#pragma unroll
        for (i32 i = 0; i < kTogether; ++i) {
            const i32 k = __shfl_sync(kAllLanes, e.k, (first + i) % kWarp);
            if (has && first + i < e.count) held[i] = *reinterpret_cast<const uint4*>(landed + static_cast<i64>(k) * kRowBytes);
        }
#pragma unroll
        for (i32 i = 0; i < kTogether; ++i) {
            const i32 owner = __shfl_sync(kAllLanes, e.owner, (first + i) % kWarp);
            const float weight = __shfl_sync(kAllLanes, e.weight, (first + i) % kWarp);
            if (first + i >= e.count) continue;
            if (owner != of && of >= 0) end_part();
            of = owner;
            float columns[kColumns];
            widen<h.type>(held[i], columns);
#pragma unroll
            for (i32 j = 0; j < kColumns; ++j) part[j] = __fadd_rn(part[j], __fmul_rn(weight, columns[j]));
        }
    }
    if (of >= 0) end_part();
    if (!has) return;
    if (a.bias != 0) {
        float bias[kColumns];
        load_columns<h.type>(reinterpret_cast<const u8*>(a.bias) + token * a.bias_stride + vector * 16, bias);
#pragma unroll
        for (i32 i = 0; i < kColumns; ++i) sum[i] = __fadd_rn(sum[i], bias[i]);
    }
    store_columns<h.type>(reinterpret_cast<u8*>(a.out) + token * a.out_stride + vector * 16, sum);
}

// By the first warp of a block: all ranks have sent us what their experts have made.
MOECOMM_FN bool await_landed(const LayerArgs& a, const Round& r) {
    bool missing = false;
    for (i32 p = lane_id(); p < a.ctx.shape.ranks && !missing; p += kWarp) {
        const u64* flag = own<const u64>(a.ctx, landed_at(a.ctx, p));
        u32 tag = 0;
        const auto landed = [&] {
            tag = signal_tag(load_acquire(flag));
            return static_cast<i32>(tag - r.tag) >= 0;  // a later one says so as well
        };
        missing = !wait_for(r, Phase::reduced, p, r.tag, landed, [&] { return static_cast<i64>(tag); });
    }
    return !__any_sync(kAllLanes, missing);
}

// Any number of blocks.
template <HomeConfig h>
MOECOMM_FN void bring_home(const LayerArgs& a) {
    constexpr i32 kSteps = 4, kVectors = kSteps * kWarp, kParts = ceil_div(h.hidden / 8, kVectors);  // of a warp at once
    static_assert(h.topk <= kWarp && h.hidden % 8 == 0, "an entry a lane, whole vectors");
    await_earlier_kernels();
    const Round round{a.ctx, Op::combine, layer_round(a)};
    if (load_relaxed(reinterpret_cast<const u32*>(a.late)) != 0 && threadIdx.x == 0 && blockIdx.x == 0)
        report_failure(round, Waited::timeout, Phase::grid, a.ctx.rank, 0, 0, a.ctx.timeout_ns);
    bool ok = true;
    if (round.tag != 0 && warp_id() == 0) ok = await_landed(a, round);
    if (!__syncthreads_and(ok)) return;
    let_next_kernel_launch();
    const i32 warps = kHomeThreads / kWarp, items = a.num_tokens * kParts;
    for (i32 item = blockIdx.x * warps + warp_id(); item < items; item += gridDim.x * warps) {
        const i32 token = item / kParts, first = item % kParts * kVectors;
        const Entries e = entries_of<h>(a, token);
#pragma unroll 1
        for (i32 step = 0; step < kSteps && first + step * kWarp < h.hidden / 8; ++step)
            add_columns<h>(a, token, e, first + step * kWarp + lane_id());
    }
}

}  // namespace moecomm
