// Loads of e4m3 scales into the ring.
//
// A product over 128 columns has one scale of x (its row's) and one of w (its 128 x 128 block's).  A slot of the ring, 128 columns deep,
// holds the scales of its rows beside the operands.
#pragma once
#include "../device/bulk.cuh"
#include "../device/lanes.cuh"
#include "ring.cuh"

namespace moecomm {

struct SlotScales {
    u32 address;  // in shared memory

    // Addresses in shared memory.
    MOECOMM_FN u32 of_x(i32 row) const { return address + (kWeightScales + row) * 4; }
    MOECOMM_FN u32 of_w(i32 index) const { return address + index * 4; }
};

// Empty for types without scales.
template <GemmConfig c, bool = c.scaled(), bool = c.mxfp4>
struct RingScales {};
template <GemmConfig c>
struct RingScales<c, true, false> {
    alignas(16) float slots[c.stages][kWeightScales + c.most_rows];

    MOECOMM_FN SlotScales slot(i32 slot) const { return {shared_address(slots[0]) + slot * static_cast<i32>(sizeof(slots[0]))}; }
};

// Starts a copy of 4 bytes into shared memory (cp.async).  One thread; its next arrive_when_loaded() orders the copy.
MOECOMM_FN void load_scale(u32 to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Arrives at `barrier`, for this thread, once all its earlier load_scale() copies have been written.
MOECOMM_FN void arrive_when_loaded(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until all load_scale() copies of this thread have been written.
MOECOMM_FN void finish_scales() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Returns the address of the first scale of w that `lane` (< kWeightScales) loads for a block.  Scales follow the row order of w in memory.
// Rows beyond the end of w are multiplied too, with the last row block's scale; their products are not stored.
template <GemmConfig c>
MOECOMM_FN const float* scales_of_w(const GemmArgs& args, i32 group, i32 block, i32 lane) {
    const i32 row = block * c.block_columns() + lane / 2 * kPartColumns;  // as they lie in the ring
    const i32 at = c.apart ? row / 2 + lane % 2 * (args.columns / 2) : row;
    const i32 rows = ceil_div(args.columns, kScaleGroup), columns = ceil_div(args.depth, kScaleGroup);
    return reinterpret_cast<const float*>(args.w_scales) + static_cast<i64>(group * rows + min(at / kScaleGroup, rows - 1)) * columns;
}

}  // namespace moecomm
