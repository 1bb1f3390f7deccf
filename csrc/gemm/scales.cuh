// Scales of e4m3, on their way into the ring.
//
// A sum over 128 columns has one scale of x, its row's, and one of w, its block's.  Both lie in the slot beside what they are of, a step.
#pragma once
#include "../device/bulk.cuh"
#include "../device/copy.cuh"
#include "ring.cuh"

namespace moecomm {

struct SlotScales {
    u32 address;  // in shared memory

    MOECOMM_FN u32 of_x(i32 row) const { return address + (kWeightScales + row) * 4; }
    MOECOMM_FN u32 of_w(i32 index) const { return address + index * 4; }
};

// Nothing for other types.
template <GemmConfig c, bool = c.scaled()>
struct RingScales {};
template <GemmConfig c>
struct RingScales<c, true> {
    alignas(16) float slots[c.stages][kWeightScales + c.most_rows];

    MOECOMM_FN SlotScales slot(i32 slot) const { return {shared_address(slots[0]) + slot * static_cast<i32>(sizeof(slots[0]))}; }
};

// 4 bytes into shared memory, of any address; and an arrival, for this thread, when all of those are there.
MOECOMM_FN void load_scale(u32 to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
MOECOMM_FN void arrive_when_loaded(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The first of those of w that a lane, below kWeightScales, loads for a block: blocks of w are counted as w lies in memory.  Rows of w
// that are not there are multiplied as well, with somebody's scale.
template <GemmConfig c>
MOECOMM_FN const float* scales_of_w(const GemmArgs& args, i32 group, i32 block, i32 lane) {
    const i32 row = block * c.block_columns() + lane / 2 * kPartColumns;  // as they lie in the ring
    const i32 at = c.apart ? row / 2 + lane % 2 * (args.columns / 2) : row;
    const i32 rows = ceil_div(args.columns, kScaleGroup), columns = ceil_div(args.depth, kScaleGroup);
    return reinterpret_cast<const float*>(args.w_scales) + static_cast<i64>(group * rows + min(at / kScaleGroup, rows - 1)) * columns;
}

}  // namespace moecomm
