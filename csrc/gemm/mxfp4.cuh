// Products of bf16 rows with packed MXFP4 weights, which are widened in registers.
//
// Weights lie in a slot as they do in memory: 64 bytes of each row, two e2m1 values a byte, the even column in the low half, with the
// 64-byte swizzle of tensor loads.  Their scales, one byte for 32 columns, are copied beside them.  A lane reads 16 bytes of each of its
// two rows, takes its byte of every four, and makes operand A of wgmma of them.  e2m1 * 2^(scale - 127) is exact in bf16 unless it exceeds
// it: the sums are those of the widened weights, in the order of multiply() (gemm.cuh).
//
// Bits of e2m1 at the upper end of a half word, with exponent and mantissa shifted down by 6, are a bf16 that is 2^126 too small, also for
// 0.5, a subnormal in both.  One product with 2^(scale - 1) then is exact up to scale 128; larger scales take a second one.
#pragma once
#include "epilogue.cuh"
#include "finish.cuh"
#include "scales.cuh"
#include "wgmma.cuh"

namespace moecomm {

constexpr i32 kMxGroup = 32;        // columns that share a scale
constexpr u32 kLargestFirst = 128;  // scale whose 2^(scale - 1) is the largest power of two in bf16
constexpr u32 kOne = 0x3f80u;       // in bf16

// The product of two pairs of bf16, subnormals included.
MOECOMM_FN u32 multiply_pairs(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
// Bytes `shift` / 8 to `shift` / 8 + 3 of two words.
MOECOMM_FN u32 word_at(const uint2& words, i32 shift) { return __funnelshift_r(words.x, words.y, shift); }

// Widens the two e2m1 values of a byte of each word, but for the scale: they are 2^126 too small.  `take`: see take_of.  Products move the
// bits, because multiprocessors have as many multipliers as units for all of logic, shifts and permutations, which are the limit here.
MOECOMM_FN void spread(const uint4& words, u32 take, u32 (&pairs)[4]) {
    const u32 bytes[4] = {__byte_perm(words.x, 0, take), __byte_perm(words.y, 0, take), __byte_perm(words.z, 0, take),
                          __byte_perm(words.w, 0, take)};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
        // Exponents and mantissas 6 and 18 bits up, signs 12 and 24.
        pairs[i] = (bytes[i] * 0x00040040u & 0x01c001c0u) | (bytes[i] * 0x01001000u & 0x80008000u);
    }
}
// Selector of __byte_perm: byte `place` alone.
MOECOMM_FN u32 take_of(i32 place) { return 0x4440u | static_cast<u32>(place); }

// 2^(scale - 1) twice, in bf16, of byte `index` of four scales up to kLargestFirst.
MOECOMM_FN u32 first_factors(u32 scales, i32 index) {
    return __byte_perm(scales, 0, 0x4040u | 0x0101u * static_cast<u32>(index)) * 128u + 0x3f003f00u;
}
// The product with two factors: the first one of at most kLargestFirst, and 1, or 2^(scale - 128) of a larger scale, or NaN of 255.
MOECOMM_FN u32 multiply_twice(u32 pair, u32 scales, i32 index) {
    const u32 scale = scales >> 8 * index & 0xffu;
    const u32 second = scale <= kLargestFirst ? kOne : scale == 255 ? 0x7fc0u : (scale - 1) << 7;
    return multiply_pairs(multiply_pairs(pair, first_factors(min(scale, kLargestFirst), 0)), second * 0x00010001u);
}
MOECOMM_FN bool some_larger(u32 scales) { return (((scales & 0x7f7f7f7fu) + 0x7f7f7f7fu) & scales & 0x80808080u) != 0; }

template <GemmConfig c>
struct RingScales<c, false, true> {
    alignas(8) u32 slots[c.stages][c.block_columns()][kPackedScaleBytes / 4];

    // Address of a slot in shared memory.
    MOECOMM_FN u32 slot(i32 slot) const { return shared_address(slots[0]) + slot * static_cast<i32>(sizeof(slots[0])); }
};

// Address of the scales of a row of w, which is counted as the row lies in the ring.  Rows beyond the end have the last row's; their
// products are not stored.
template <GemmConfig c>
MOECOMM_FN u64 packed_scales_at(const GemmArgs& args, i32 group, i32 row) {
    const i64 in_memory = c.apart ? apart_row(row, args.columns / 2) : min(row, args.columns - 1);
    return args.w_scales + (static_cast<i64>(group) * args.columns + in_memory) * (args.depth / kMxGroup);
}

// Where a warp finds the scales of a tile, step after step.  They begin at any byte: two words from a multiple of 4 on hold the four of a
// step.
template <GemmConfig c>
struct PackedWalk {
    static constexpr i32 kRows = c.block_columns() / kWarp;  // of a lane
    u64 rows[kRows], last;                                   // words: of each row, and the last one of all scales

    MOECOMM_FN PackedWalk(const GemmArgs& args, i32 group, i32 block) {
        const u64 scales = static_cast<u64>(args.grouping.groups) * args.columns * (args.depth / kMxGroup);
        last = (args.w_scales + scales - 1) & ~3ull;
#pragma unroll
        for (i32 i = 0; i < kRows; ++i)
            rows[i] = packed_scales_at<c>(args, group, block * c.block_columns() + i * kWarp + lane_id()) & ~3ull;
    }
    // Starts to copy the scales of the next step to `slot`.  A whole warp; arrive_when_loaded() orders the copies.
    MOECOMM_FN void load(u32 slot) {
#pragma unroll
        for (i32 i = 0; i < kRows; ++i) {
            const u32 to = slot + (i * kWarp + lane_id()) * kPackedScaleBytes;
            load_scale(to, reinterpret_cast<const float*>(min(rows[i], last)));
            load_scale(to + 4, reinterpret_cast<const float*>(min(rows[i] + 4, last)));
            rows[i] += c.depth() / kMxGroup;
        }
    }
};

// The scales of a step, of a lane's two rows.
struct StepScales {
    u32 rows[2];
    bool larger;  // in all lanes of the warp: scales of some lane exceed kLargestFirst
};

// A lane's part of a tile: places of its two rows of w, 8 from each other.
template <GemmConfig c>
struct PackedTile {
    u32 values, scales;  // offsets of the first row in a slot
    u32 swizzle, take;
    i32 first_shift, second_shift;  // of word_at
    i32 groups;                     // scales of a row

    MOECOMM_FN PackedTile(const GemmArgs& args, i32 group, i32 block, i32 math_group) {
        const i32 row = math_group * kPartColumns + warp_id() % 4 * 16 + lane_id() / 4, in_all = block * c.block_columns() + row;
        values = row * kPackedRowBytes;
        scales = row * kPackedScaleBytes;
        swizzle = row / 2 % 4;
        take = take_of(lane_id() % 4);
        first_shift = static_cast<i32>(packed_scales_at<c>(args, group, in_all) % 4) * 8;
        second_shift = static_cast<i32>(packed_scales_at<c>(args, group, in_all + 8) % 4) * 8;
        groups = args.depth / kMxGroup;
    }
    // The scales of a step, of a slot's at `from`.  Those beyond the end of the row are 0, as the values are.  A whole warp.
    MOECOMM_FN StepScales scales_of(u32 from, i32 step) const {
        StepScales found;
        found.rows[0] = word_at(load_shared_words(from), first_shift);
        found.rows[1] = word_at(load_shared_words(from + 8 * kPackedScaleBytes), second_shift);
        const i32 left = groups - step * (c.depth() / kMxGroup);
        const u32 there = left >= 4 ? ~0u : (1u << 8 * left) - 1;
        found.rows[0] &= there;
        found.rows[1] &= there;
        found.larger = __any_sync(kAllLanes, some_larger(found.rows[0]) || some_larger(found.rows[1]));
        return found;
    }
};

// Loads 32 columns of a slot, which share a scale, of a lane's two rows.  `at`: the lane's values in the slot.
template <i32 group>
MOECOMM_FN void load_packed(u32 at, u32 swizzle, uint4 (&words)[2]) {
    const u32 chunk = (static_cast<u32>(group) ^ swizzle) * 16;
#pragma unroll
    for (i32 second = 0; second < 2; ++second) words[second] = load_shared(at + second * 8 * kPackedRowBytes + chunk);
}

// Makes operand A of two products of loaded words: the 32 columns of one group.
template <i32 group>
MOECOMM_FN void widen_packed(const uint4 (&words)[2], u32 take, const StepScales& scales, u32 (&a)[8]) {
    u32 pairs[2][4];
#pragma unroll
    for (i32 second = 0; second < 2; ++second) spread(words[second], take, pairs[second]);
    if (scales.larger) {
#pragma unroll
        for (i32 i = 0; i < 8; ++i) a[i] = multiply_twice(pairs[i % 2][i / 2], scales.rows[i % 2], group);
    } else {
        const u32 factors[2] = {first_factors(scales.rows[0], group), first_factors(scales.rows[1], group)};
#pragma unroll
        for (i32 i = 0; i < 8; ++i) a[i] = multiply_pairs(pairs[i % 2][i / 2], factors[i % 2]);
    }
}

// Where the products of a slot find their operands.
struct PackedSlot {
    u32 w, x;
};

// Starts the products of one group.  Called by a math warpgroup.
template <GemmConfig c, i32 n, i32 group, i32 size>
MOECOMM_FN void start_group(u32 x, const u32 (&a)[8], float (&accum)[size]) {
    wgmma_begin();
#pragma unroll
    for (i32 k = 0; k < 2; ++k)
        wgmma_registers<n>(accum, a + 4 * k, operand(x + group / 2 * (c.box_bytes() / 16) + group % 2 * 4 + 2 * k), 1);
    wgmma_commit();
}
// Widens the loaded group of a slot, loads the next one, and starts the products; those of the group before are complete on return.
template <GemmConfig c, i32 n, i32 group, i32 size>
MOECOMM_FN void multiply_group(const PackedTile<c>& tile, const PackedSlot& slot, const StepScales& scales, uint4 (&words)[2], u32 (&a)[8],
                               float (&accum)[size]) {
    widen_packed<group>(words, tile.take, scales, a);
    if constexpr (group + 1 < c.depth() / kMxGroup) load_packed<group + 1>(slot.w, tile.swizzle, words);
    start_group<c, n, group>(slot.x, a, accum);
    wgmma_wait<1>();
}
// multiply_group with fewer registers: completes the products of the group before, and widens its own group after that.
template <GemmConfig c, i32 n, i32 group, i32 size>
MOECOMM_FN void multiply_group_alone(const PackedTile<c>& tile, const PackedSlot& slot, const StepScales& scales, u32 (&a)[8],
                                     float (&accum)[size]) {
    uint4 words[2];
    load_packed<group>(slot.w, tile.swizzle, words);
    wgmma_wait<0>();
    widen_packed<group>(words, tile.take, scales, a);
    start_group<c, n, group>(slot.x, a, accum);
}

// Multiplies 64 rows of w by n rows of x over the whole depth.  Called by a math warpgroup.  Each step waits for `full`; registers of
// operand A alternate between groups of columns, unless other blocks of the multiprocessor work meanwhile.  Cannot fail.
template <GemmConfig c, i32 n, i32 size>
MOECOMM_FN void multiply_packed_rows(Ring<c>& ring, RingBarriers<c>& barriers, const RingScales<c>& ring_scales, RingPlace<c>& place,
                                     const PackedTile<c>& tile, i32 steps, float (&accum)[size]) {
    const u32 x = operand_at(shared_address(ring.x[0])), w = shared_address(ring.w[0]) + tile.values;
    u32 a[c.blocks_per_sm == 1 ? 2 : 1][8];
    i32 before = 0;
#pragma unroll
    for (i32 i = 0; i < n / 2; ++i) accum[i] = 0.0f;
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step) {
        copy_wait(&barriers.full[place.slot], place.phase);
        const PackedSlot slot{w + place.slot * c.weight_bytes(), x + place.slot * (c.row_bytes() / 16)};
        const u32 of_rows = ring_scales.slot(place.slot) + tile.scales;
        if constexpr (c.blocks_per_sm == 1) {
            uint4 words[2];
            load_packed<0>(slot.w, tile.swizzle, words);
            const StepScales scales = tile.scales_of(of_rows, step);
            multiply_group<c, n, 0>(tile, slot, scales, words, a[0], accum);
            if (step > 0) release_slot<c>(barriers, before);
            multiply_group<c, n, 1>(tile, slot, scales, words, a[1], accum);
            multiply_group<c, n, 2>(tile, slot, scales, words, a[0], accum);
            multiply_group<c, n, 3>(tile, slot, scales, words, a[1], accum);
        } else {
            const StepScales scales = tile.scales_of(of_rows, step);
            multiply_group_alone<c, n, 0>(tile, slot, scales, a[0], accum);
            if (step > 0) release_slot<c>(barriers, before);
            multiply_group_alone<c, n, 1>(tile, slot, scales, a[0], accum);
            multiply_group_alone<c, n, 2>(tile, slot, scales, a[0], accum);
            multiply_group_alone<c, n, 3>(tile, slot, scales, a[0], accum);
        }
        before = place.slot;
        place.step();
    }
    wgmma_wait<0>();
    release_slot<c>(barriers, before);
}
// Multiplies a tile, with the instance whose n is `padded`.  Called by a math warpgroup; `accum` is complete on return.
template <GemmConfig c, i32 n = c.most_rows, i32 size>
MOECOMM_FN void multiply_packed(Ring<c>& ring, RingBarriers<c>& barriers, const RingScales<c>& scales, RingPlace<c>& place,
                                const PackedTile<c>& tile, i32 steps, i32 padded, float (&accum)[size]) {
    static_assert(c.type == Type::bf16 && c.swapped && !c.channel_scales, "x is bf16, and w operand A");
    if (n > c.row_unit && padded != n) {
        if constexpr (n > c.row_unit) multiply_packed<c, n - c.row_unit>(ring, barriers, scales, place, tile, steps, padded, accum);
    } else {
        multiply_packed_rows<c, n>(ring, barriers, scales, place, tile, steps, accum);
    }
}

}  // namespace moecomm
