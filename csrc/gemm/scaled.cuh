// Scaled e4m3 products with two levels of accumulation.  Tensor cores keep few bits of a sum of e4m3 products, so they add up 128 columns
// only; each such product, times its scales, is added to a second accumulator in fp32 registers.
#pragma once
#include "scales.cuh"
#include "wgmma.cuh"

namespace moecomm {

MOECOMM_FN float2 load_shared_pair(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
// Keeps the compiler from reading accumulator registers before this point.  Call it after wgmma_wait().
template <i32 size>
MOECOMM_FN void pin_registers(float (&accum)[size]) {
#pragma unroll
    for (i32 i = 0; i < size; ++i) asm volatile("" : "+f"(accum[i])::"memory");
}
template <i32 size>
MOECOMM_FN void pin_integers(i32 (&accum)[size]) {
#pragma unroll
    for (i32 i = 0; i < size; ++i) asm volatile("" : "+r"(accum[i])::"memory");
}

// accum += products, each times the scales of its row of x and its row of w.  Called by each lane for its registers, after `full` of the
// slot completed.  `part`: index over all parts of the block.
template <GemmConfig c, i32 n, i32 size>
MOECOMM_FN void add_scaled(float (&accum)[size], const float (&products)[n / 2], const SlotScales& scales, i32 part) {
    const float2 of_w = load_shared_pair(scales.of_w(2 * part));
    const u32 of_x = scales.of_x(lane_id() % 4 * 2);
#pragma unroll
    for (i32 j = 0; j < n / 8; ++j) {
        const float2 of_rows = load_shared_pair(of_x + 8 * j * 4);
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {  // with `apart`, gate rows, then up rows
            const float other = c.apart && half == 1 ? of_w.y : of_w.x;
            float* const to = accum + 4 * j + 2 * half;
            to[0] = __fmaf_rn(products[4 * j + 2 * half], of_rows.x * other, to[0]);
            to[1] = __fmaf_rn(products[4 * j + 2 * half + 1], of_rows.y * other, to[1]);
        }
    }
}

// Multiplies a warpgroup's rows of w by n rows of x over the whole depth.  Called by a math warpgroup.  Waits for `full` of each slot and
// releases the slot when its operands and scales have been read.  Cannot fail.
//
// The products of a part are added up before the next part begins, so registers hold the accumulators of all parts and the products of one.
// Meanwhile the tensor cores work for the other warpgroup.
template <GemmConfig c, i32 n, i32 size>
MOECOMM_FN void multiply_scaled(Ring<c>& ring, RingBarriers<c>& barriers, const RingScales<c>& scales, RingPlace<c>& place, i32 math_group,
                                i32 steps, float (&accum)[c.parts()][size]) {
    const u32 w = operand_at(shared_address(ring.w[0]) + math_group * (c.weight_bytes() / kMathGroups));
    const u32 x = operand_at(shared_address(ring.x[0]));
    float products[n / 2] = {};
#pragma unroll
    for (i32 part = 0; part < c.parts(); ++part)
#pragma unroll
        for (i32 i = 0; i < n / 2; ++i) accum[part][i] = 0.0f;
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        copy_wait(&barriers.full[place.slot], place.phase);
        const u32 w_slot = w + place.slot * (c.weight_bytes() / 16), x_slot = x + place.slot * (c.row_bytes() / 16);
#pragma unroll
        for (i32 part = 0; part < c.parts(); ++part) {
            wgmma_begin();
#pragma unroll
            for (i32 k = 0; k < kSlotRowBytes / 32; ++k) {
                const u32 rows = w_slot + part * (kPartColumns * kSlotRowBytes / 16) + 2 * k;
                wgmma<c.type, n>(products, operand(rows), operand(x_slot + 2 * k), k > 0 ? 1 : 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
            pin_registers(products);
            add_scaled<c, n>(accum[part], products, scales.slot(place.slot), math_group * c.parts() + part);
        }
        __syncwarp();  // all lanes have read their scales
        release_slot(barriers, place.slot);
        place.step();
    }
}

}  // namespace moecomm
