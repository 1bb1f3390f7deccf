// Scaled e4m3 products of many rows: x is operand A, 64 rows a warpgroup, and w is operand B.
//
// A lane then has accumulators of two rows of x, and few scales: adding a product of 128 columns costs one fma per accumulator.  The bits
// are those of swapped operands: the same products in the same order, with the same product of the two scales.
#pragma once
#include "scaled.cuh"

namespace moecomm {

constexpr i32 kGroupRows = 64;  // rows of x of a warpgroup
constexpr i32 kPartUnits = 2;   // a part has kPartUnits * kPartColumns rows of w
constexpr i32 kUnrolled = 4;    // steps
constexpr i32 kRowsPart = kPartUnits * kPartColumns;

MOECOMM_FN float load_shared_float(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

// Scales of a lane's two rows of x, which are 8 rows from each other.
struct RowScales {
    float of[2];

    MOECOMM_FN void load(const SlotScales& slot, i32 row) {
        of[0] = load_shared_float(slot.of_x(row));
        of[1] = load_shared_float(slot.of_x(row + 8));
    }
};
// Scales of a part's rows of w: one, or with GemmConfig::apart two a unit, of its gate rows and of its up rows.
template <GemmConfig c>
struct PartScales {
    float of[kPartUnits][2];

    MOECOMM_FN void load(const SlotScales& slot, i32 part) {
#pragma unroll
        for (i32 unit = 0; unit < (c.apart ? kPartUnits : 1); ++unit) {
            const float2 both = load_shared_pair(slot.of_w(2 * (part * kPartUnits + unit)));
            of[unit][0] = both.x;
            of[unit][1] = both.y;
        }
    }
    MOECOMM_FN float at(i32 eight) const { return c.apart ? of[eight * kWoven / kPartColumns][eight % 2] : of[0][0]; }
};

// accum += products, each times the scales of its row of x and its row of w.  Called by each lane for its registers.
template <GemmConfig c, i32 size>
MOECOMM_FN void add_rows(float (&accum)[size], const float (&products)[size], const RowScales& of_x, const PartScales<c>& of_w) {
#pragma unroll
    for (i32 i = 0; i < size; ++i) accum[i] = __fmaf_rn(products[i], of_x.of[i / 2 % 2] * of_w.at(i / 4), accum[i]);
}

// A warpgroup's share of a tile: 64 rows and all parts; or, of a tile of at most 64 rows, all rows and one of the two parts.
template <GemmConfig c>
struct Share {
    i32 first_row, first_part;
    bool all_parts;

    // rows: of the tile, rounded up to units or not.
    MOECOMM_FN Share(i32 rows, i32 math_group)
        : first_row(rows > kGroupRows ? math_group * kGroupRows : 0),
          first_part(rows > kGroupRows ? 0 : math_group),
          all_parts(rows > kGroupRows) {
        static_assert(c.parts() == kMathGroups && c.most_rows == kMathGroups * kGroupRows, "as many parts as warpgroups");
    }
};

// Multiplies 64 rows of x by `parts` parts of w over the whole depth.  Called by a math warpgroup.  Waits for `full` of each slot; a slot
// is released before its last products are added up.  Cannot fail.
//
// Registers hold the accumulators of both parts and the products of one.  While the warpgroup adds up, the tensor cores work for the other
// one.  They do so only if the products of a step are issued one right behind the other.  So matrix descriptors must be in uniform
// registers, where the tensor cores read them: see this_math_group().
template <GemmConfig c, i32 parts, i32 size>
MOECOMM_FN void multiply_share(Ring<c>& ring, RingBarriers<c>& barriers, const RingScales<c>& scales, RingPlace<c>& place, i32 math_group,
                               i32 steps, float (&accum)[c.parts()][size]) {
    static_assert(c.parts() * kRowsPart == c.block_columns() && 2 * size == kRowsPart, "parts of 128 rows of w");
    const i32 first_part = parts == c.parts() ? 0 : math_group, first_row = parts == c.parts() ? math_group * kGroupRows : 0;
    const u32 w = operand_at(shared_address(ring.w[0])) + first_part * (kRowsPart * kSlotRowBytes / 16);
    const u32 x = operand_at(shared_address(ring.x[0])) + first_row * (kSlotRowBytes / 16);
    const i32 row = first_row + warp_id() % 4 * 16 + lane_id() / 4;
    constexpr i32 unrolled = c.widens() ? 2 : kUnrolled;
    float products[size] = {};
#pragma unroll
    for (i32 part = 0; part < parts; ++part)
#pragma unroll
        for (i32 i = 0; i < size; ++i) accum[part][i] = 0.0f;
#pragma unroll unrolled
    for (i32 step = 0; step < steps; ++step) {
        const i32 slot = place.slot;
        const u32 w_slot = w + slot * (c.weight_bytes() / 16), x_slot = x + slot * (c.row_bytes() / 16);
        copy_wait(&barriers.full[slot], place.phase);
        RowScales of_x;
        of_x.load(scales.slot(slot), row);
#pragma unroll
        for (i32 part = 0; part < parts; ++part) {
            wgmma_begin();
#pragma unroll
            for (i32 k = 0; k < kSlotRowBytes / 32; ++k) {
                const u32 columns = w_slot + part * (kRowsPart * kSlotRowBytes / 16) + 2 * k;
                wgmma<c.type, kRowsPart>(products, operand(x_slot + 2 * k), operand(columns), k > 0 ? 1 : 0);
            }
            wgmma_commit();
            PartScales<c> of_w;
            of_w.load(scales.slot(slot), first_part + part);
            wgmma_wait<0>();
            pin_registers(products);
            if (part + 1 == parts) {
                __syncwarp();  // all lanes have read their scales
                release_slot(barriers, slot);
            }
            add_rows<c>(accum[part], products, of_x, of_w);
        }
        place.step();
    }
}

// Multiplies a math warpgroup's share of a tile; `accum` is complete on return.
template <GemmConfig c, i32 size>
MOECOMM_FN void multiply_rows(Ring<c>& ring, RingBarriers<c>& barriers, const RingScales<c>& scales, RingPlace<c>& place, i32 math_group,
                              i32 steps, i32 padded, float (&accum)[c.parts()][size]) {
    if (padded > kGroupRows) {
        multiply_share<c, c.parts()>(ring, barriers, scales, place, math_group, steps, accum);
    } else {
        multiply_share<c, 1>(ring, barriers, scales, place, math_group, steps, accum);
    }
}

}  // namespace moecomm
