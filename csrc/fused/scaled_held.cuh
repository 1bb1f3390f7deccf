// Products of e4m3 with scales, of many rows of x that are held in registers while they are multiplied: shared memory is read for weights
// alone, and the tensor cores always have a product to go on with, that of one part of the weights while another's is added up.
#pragma once
#include "scaled_rows.cuh"

namespace moecomm {

// Four 8 x 16-byte matrices: lane l gives the address of row l % 8 of matrix l / 8, and gets 4 bytes of row l / 4 of each.
MOECOMM_FN void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// A warp's 16 rows of x, of a slot.
struct HeldRows {
    u32 words[kSlotRowBytes / 32][4];

    // Where a lane's 16 bytes of the first 32 lie in the swizzle, in the first slot.
    MOECOMM_FN static u32 place(u32 rows) {
        const i32 lane = lane_id();
        return rows + (lane % 16) * kSlotRowBytes + (lane / 16 ^ lane % 8) * 16;
    }
    MOECOMM_FN void load(u32 place) {
#pragma unroll
        for (i32 k = 0; k < kSlotRowBytes / 32; ++k) load_matrices(words[k], place ^ 32 * k);
    }
};

// products = rows of x times kPartColumns rows of w; begun.
template <GemmConfig c>
MOECOMM_FN void begin_held(float (&products)[kPartColumns / 2], const HeldRows& x, u32 w) {
    wgmma_begin();
#pragma unroll
    for (i32 k = 0; k < kSlotRowBytes / 32; ++k) wgmma_held<c.type>(products, x.words[k], operand(w + 2 * k), k > 0 ? 1 : 0);
    wgmma_commit();
}

// sums += products, each times the scales of its row and its column; unit: of those of w in the slot.
template <GemmConfig c>
MOECOMM_FN void add_held(float* sums, const float (&products)[kPartColumns / 2], const RowScales& of_x, float2 of_w) {
#pragma unroll
    for (i32 i = 0; i < kPartColumns / 2; ++i)
        sums[i] = __fmaf_rn(products[i], of_x.of[i / 2 % 2] * (c.apart && i / 4 % 2 == 1 ? of_w.y : of_w.x), sums[i]);
}

// As multiply_share does, parts cut in units: while one is added up, the next is multiplied.
template <GemmConfig c, i32 parts, i32 size>
MOECOMM_FN void multiply_held(Ring<c>& ring, RingBarriers<c>& barriers, const RingScales<c>& scales, RingPlace<c>& place,
                              const Share<c>& share, i32 steps, float (&sums)[c.parts()][size]) {
    constexpr i32 units = parts * kPartUnits;
    const i32 first_part = parts == c.parts() ? 0 : share.first_part;  // known to be the same in all threads
    const u32 w = operand_at(shared_address(ring.w[0]) + first_part * (kRowsPart * kSlotRowBytes));
    const i32 first = share.first_row + warp_id() % 4 * 16, row = first + lane_id() / 4;
    const u32 x = HeldRows::place(shared_address(ring.x[0]) + first * kSlotRowBytes);
    float products[2][kPartColumns / 2] = {};
#pragma unroll
    for (i32 part = 0; part < parts; ++part)
#pragma unroll
        for (i32 i = 0; i < size; ++i) sums[part][i] = 0.0f;
    copy_wait(&barriers.full[place.slot], place.phase);
    HeldRows held;
    held.load(x + place.slot * c.row_bytes());
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        const i32 was = place.slot;
        const u32 w_slot = w + was * (c.weight_bytes() / 16);
        const SlotScales slot = scales.slot(was);
        begin_held<c>(products[0], held, w_slot);
#pragma unroll
        for (i32 unit = 0; unit < units; ++unit) {
            RowScales of_x;
            of_x.load(slot, row);
            const float2 of_w = load_shared_pair(slot.of_w(2 * (first_part * kPartUnits + unit)));
            if (unit + 1 < units) {
                begin_held<c>(products[(unit + 1) % 2], held, w_slot + (unit + 1) * (kPartColumns * kSlotRowBytes / 16));
                wgmma_wait<1>();
            } else {
                place.step();
                if (step + 1 < steps) copy_wait(&barriers.full[place.slot], place.phase);
                wgmma_wait<0>();
                __syncwarp();  // no lane reads a scale any more
                release_slot(barriers, was);
                if (step + 1 < steps) held.load(x + place.slot * c.row_bytes());
            }
            settle(products[unit % 2]);
            add_held<c>(sums[unit / kPartUnits] + unit % kPartUnits * (kPartColumns / 2), products[unit % 2], of_x, of_w);
        }
    }
}

// All that a warpgroup has of a tile.
template <GemmConfig c, i32 size>
MOECOMM_FN void multiply_rows(Ring<c>& ring, RingBarriers<c>& barriers, const RingScales<c>& scales, RingPlace<c>& place, i32 math_group,
                              i32 steps, i32 padded, float (&sums)[c.parts()][size]) {
    const Share<c> share(padded, math_group);
    if constexpr (c.held) {
        if (share.all_parts) {
            multiply_held<c, c.parts()>(ring, barriers, scales, place, share, steps, sums);
        } else {
            multiply_held<c, 1>(ring, barriers, scales, place, share, steps, sums);
        }
    } else if (share.all_parts) {
        multiply_share<c, c.parts()>(ring, barriers, scales, place, share, steps, sums);
    } else {
        multiply_share<c, 1>(ring, barriers, scales, place, share, steps, sums);
    }
}

}  // namespace moecomm
