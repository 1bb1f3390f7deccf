// Products of e4m3 rows with packed MXFP4 weights, which become e4m3 in registers.
//
// A slot holds 64 bytes of each row of w: 128 columns, in the order in which lanes consume them.  Lane t of the four that share a row takes
// bytes 16 t to 16 t + 15, a word for each group of 32 columns: columns 4 t + {0, 1, 2, 3} of the group, then columns 16 + 4 t + {0, 1, 2,
// 3}.  In a word, magnitude i is bits 4 i to 4 i + 2; signs of the first four are bits 7, 15, 23 and 31, of the others bits 3, 11, 19, 27.
// A permutation of bytes looks up four e4m3 magnitudes at once, in a table of 8.
//
// A word of scales belongs to 128 columns of a row.  The low half of byte g is `rise` of group g, 0 to kMostRise: its weights are e2m1 *
// 2^(rise - 5), normal numbers in e4m3, times the row's 2^(exponent - 127).  The high halves of bytes 2 and 3 are the exponent, a float's
// (255: infinity, and all its values are 0, so that sums become NaN).  moecomm/fused/packed_mxfp4.py packs both.
#pragma once
#include "epilogue.cuh"
#include "finish.cuh"
#include "scaled_rows.cuh"

namespace moecomm {

constexpr u32 kLowHalves = 0x0f0f0f0fu, kByteSigns = 0x80808080u;
// e4m3 of 0, 0.5, 1 and 1.5, and of 2, 3, 4 and 6, times 2^-5; and an exponent more in each byte that is not 0.
constexpr u32 kLowTable = 0x14100800u, kHighTable = 0x24201c18u, kLowRise = 0x08080800u, kHighRise = 0x08080808u;

// Bytes of `low` and `high` by the half bytes of `places`, which are below 8.  Other than __byte_perm, it does not mask them again.
MOECOMM_FN u32 look_up(u32 low, u32 high, u32 places) {
    u32 found;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(places));
    return found;
}
MOECOMM_FN u32 load_shared_word(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
// Starts a copy of 16 bytes into shared memory (cp.async), as load_scale().
MOECOMM_FN void load_four_scales(u32 to, const u32* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The 8 values of a word as e4m3.
MOECOMM_FN void to_e4m3(u32 word, u32 rise, u32& first, u32& second) {
    const u32 low = rise * kLowRise + kLowTable, high = rise * kHighRise + kHighTable, places = word & 0x77777777u;
    first = look_up(low, high, places) | (word & kByteSigns);
    second = look_up(low, high, places >> 16) | (word << 4 & kByteSigns);
}
// The factor of a row: 2^(exponent - 127) of its word of scales.
MOECOMM_FN float factor_of(u32 scales) { return __uint_as_float((scales >> 1 & 0x78000000u) | (scales << 3 & 0x07800000u)); }

template <GemmConfig c>
struct RingScales<c, true, true> {
    struct Slot {
        u32 of_w[c.block_columns()];
        float of_x[c.most_rows];
    };
    alignas(16) Slot slots[c.stages];

    // Addresses in shared memory.
    MOECOMM_FN u32 of_w(i32 slot) const { return shared_address(slots[0].of_w) + slot * static_cast<i32>(sizeof(Slot)); }
    MOECOMM_FN u32 of_x(i32 slot) const { return shared_address(slots[0].of_x) + slot * static_cast<i32>(sizeof(Slot)); }
};

// Where a lane finds the scales of w of a tile, step after step: u32[groups][steps][columns].  Four rows of w that begin at a multiple of
// four lie together, also where gate rows are apart from up rows.
template <GemmConfig c>
struct PackedScalesWalk {
    static constexpr i32 kFours = c.block_columns() / (4 * kWarp);  // of a lane
    static_assert(kFours * 4 * kWarp == c.block_columns() && kWoven % 4 == 0, "whole warps copy");
    const u32* step;
    i32 rows[kFours], columns;

    MOECOMM_FN PackedScalesWalk(const GemmArgs& args, i32 group, i32 block) : columns(args.columns) {
        step = reinterpret_cast<const u32*>(args.w_scales) + static_cast<i64>(group) * ceil_div(args.depth, c.depth()) * args.columns;
#pragma unroll
        for (i32 i = 0; i < kFours; ++i) {  // rows beyond the end have the last ones' scales; their products are not stored
            const i32 row = block * c.block_columns() + (i * kWarp + lane_id()) * 4;
            rows[i] = c.apart ? apart_row(min(row, args.columns - 4), args.columns / 2) : min(row, args.columns - 4);
        }
    }
    // Starts to copy the scales of the next step to `to`.  A whole warp; arrive_when_loaded() orders the copies.
    MOECOMM_FN void load(u32 to) {
#pragma unroll
        for (i32 i = 0; i < kFours; ++i) load_four_scales(to + (i * kWarp + lane_id()) * 16, step + rows[i]);
        step += columns;
    }
};

// Makes operand A of a step's four products, 64 rows of w, and the factors of a lane's two rows.  `values`: the lane's 16 bytes of the
// first row in the slot; `scales`: that row's.
MOECOMM_FN void widen_rows(u32 values, u32 scales, u32 (&a)[16], float (&factors)[2]) {
#pragma unroll
    for (i32 second = 0; second < 2; ++second) {
        const uint4 loaded = load_shared(values + second * 8 * kPackedRowBytes);
        const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        const u32 word = load_shared_word(scales + second * 8 * 4), rises = word & kLowHalves;
#pragma unroll
        for (i32 i = 0; i < 4; ++i)
            to_e4m3(words[i], look_up(rises, 0, 0x4440u | static_cast<u32>(i)), a[4 * i + second], a[4 * i + 2 + second]);
        factors[second] = factor_of(word);
    }
}

// accum += products, each times the scale of its row of x and the factor of its row of w.  `of_x`: the lane's first two rows' scales.
template <i32 n, i32 size>
MOECOMM_FN void add_packed(float (&accum)[size], const float (&products)[n / 2], u32 of_x, const float (&factors)[2]) {
#pragma unroll
    for (i32 j = 0; j < n / 8; ++j) {
        const float2 of_rows = load_shared_pair(of_x + 8 * j * 4);
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
            float* const to = accum + 4 * j + 2 * half;
            to[0] = __fmaf_rn(products[4 * j + 2 * half], of_rows.x * factors[half], to[0]);
            to[1] = __fmaf_rn(products[4 * j + 2 * half + 1], of_rows.y * factors[half], to[1]);
        }
    }
}

// A lane's part of the ring: addresses in the first slot.
template <GemmConfig c>
struct PackedLane {
    static constexpr i32 kScales = sizeof(typename RingScales<c>::Slot);
    u32 values, of_w, of_x, x;  // x: as operand_at()

    MOECOMM_FN PackedLane(Ring<c>& ring, const RingScales<c>& scales, i32 math_group) {
        const i32 row = math_group * c.parts() * kPartColumns + warp_id() % 4 * 16 + lane_id() / 4;
        values = shared_address(ring.w[0]) + row * kPackedRowBytes + ((lane_id() % 4) ^ (row / 2 % 4)) * 16;
        of_w = scales.of_w(0) + row * 4;
        of_x = scales.of_x(0) + lane_id() % 4 * 8;
        x = operand_at(shared_address(ring.x[0]));
    }
    // Makes operand A of a part of a slot, and the factors of the lane's two rows.
    MOECOMM_FN void widen(i32 slot, i32 part, u32 (&a)[16], float (&factors)[2]) const {
        widen_rows(values + slot * c.weight_bytes() + part * (kPartColumns * kPackedRowBytes),
                   of_w + slot * kScales + part * (kPartColumns * 4), a, factors);
    }
    // The rows of x in a slot, as operand_at(), in a uniform register.
    MOECOMM_FN u32 rows_of(i32 slot) const { return uniform(x + slot * (c.row_bytes() / 16)); }
    // Starts a part's products with `rows` of rows_of().
    template <i32 n>
    MOECOMM_FN static void start(u32 rows, const u32 (&a)[16], float (&products)[n / 2]) {
        wgmma_begin();
#pragma unroll
        for (i32 k = 0; k < 4; ++k) wgmma_registers<c.type, n>(products, a + 4 * k, operand(rows + 2 * k), k > 0 ? 1 : 0);
        wgmma_commit();
    }
    // Completes the products that have been started, of a slot, and adds them up.
    template <i32 n, i32 size>
    MOECOMM_FN void finish(i32 slot, float (&accum)[size], float (&products)[n / 2], const float (&factors)[2]) const {
        wgmma_wait<0>();
        pin_registers(products);
        add_packed<n>(accum, products, of_x + slot * kScales, factors);
    }
};

// Multiplies a warpgroup's rows of w by n rows of x over the whole depth.  Called by a math warpgroup.  Waits for `full` of each slot and
// releases the slot when its operands and scales have been read.  Cannot fail.
//
// A part's weights are widened while the tensor cores multiply the part before.  There are registers for it up to 64 rows.
template <GemmConfig c, i32 n, i32 size>
MOECOMM_FN void multiply_packed_scaled(Ring<c>& ring, RingBarriers<c>& barriers, const RingScales<c>& scales, RingPlace<c>& place,
                                       i32 math_group, i32 steps, float (&accum)[c.parts()][size]) {
    static_assert(c.parts() == 2 && c.swapped && c.depth() == kScaleGroup, "operand A of a part is in registers");
    static_assert(n <= 64, "two operands A, sums and products are in registers");
    const PackedLane<c> lane(ring, scales, math_group);
    float products[n / 2] = {}, factors[2][2] = {};
    u32 a[2][16];
    i32 before = 0;
#pragma unroll
    for (i32 part = 0; part < c.parts(); ++part)
#pragma unroll
        for (i32 i = 0; i < n / 2; ++i) accum[part][i] = 0.0f;
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        copy_wait(&barriers.full[place.slot], place.phase);
        const u32 rows = lane.rows_of(place.slot);
        lane.widen(place.slot, 0, a[0], factors[0]);
        if (step > 0) {
            lane.template finish<n>(before, accum[1], products, factors[1]);
            __syncwarp();  // all lanes have read their scales
            release_slot<c>(barriers, before);
        }
        lane.template start<n>(rows, a[0], products);
        lane.widen(place.slot, 1, a[1], factors[1]);
        lane.template finish<n>(place.slot, accum[0], products, factors[0]);
        lane.template start<n>(rows, a[1], products);
        before = place.slot;
        place.step();
    }
    lane.template finish<n>(before, accum[1], products, factors[1]);
    __syncwarp();
    release_slot<c>(barriers, before);
}

}  // namespace moecomm
