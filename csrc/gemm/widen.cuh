// Packed MXFP4 weights beside e4m3 rows.  Warpgroups of their own widen them in shared memory, into slots of the ring, which the loops for
// FP8 then multiply: the sums are those of e4m3 weights with scales of 128 x 128.
//
// Packed weights pass through a ring of their own.  A slot holds 64 bytes of each row of w, without swizzle: 128 columns, 16 bytes for each
// 32 of them.  In memory, 128 columns of eight rows lie together, row after row, so that a slot is loaded in whole cache lines.  In each
// word of 8 columns, magnitude i is bits 4 i to 4 i + 2; signs of the first four columns are bits 7, 15, 23 and 31, of the others bits 3,
// 11, 19 and 27.  So a permutation of bytes looks up four e4m3 magnitudes at once, in a table of 8.
//
// A word of scales belongs to 128 columns of a row.  Bits 4 g to 4 g + 3 are the rise of its group g of 32 columns, whose weights are e2m1
// * 2^(rise - 8), exact in e4m3; rise 15 stands for NaNs.  The upper half is the factor of the row's block, a power of two in bf16: the
// scale of w of the ring's slot.  moecomm/fused/packed_mxfp4.py packs both.
#pragma once
#include "epilogue.cuh"
#include "scales.cuh"

namespace moecomm {

constexpr i32 kPackedWords = kWoven * kPackedRowBytes / 4;  // of eight rows in a slot
constexpr i32 kWideningWarps = kWarpgroup / kWarp;          // of a group

// Magnitudes of e2m1 * 2^(rise - 8) in e4m3: of 0, 0.5, 1 and 1.5, and of 2, 3, 4 and 6.  Those of rises 0 to 2 are subnormal, in part.
MOECOMM_BOTH constexpr u32 low_magnitudes(i32 rise) {
    if (rise == kRises - 1) return 0x7f7f7f7fu;
    return rise < 3 ? 0x03020100u << rise : 0x14100800u + 0x08080800u * static_cast<u32>(rise - 3);
}
MOECOMM_BOTH constexpr u32 high_magnitudes(i32 rise) {
    if (rise == kRises - 1) return 0x7f7f7f7fu;
    return rise < 1 ? 0x0c080604u : 0x14100c08u + 0x08080808u * static_cast<u32>(rise - 1);
}

// Bytes of `low` and `high` by the half bytes of `places`, which are below 8.  __byte_perm would mask these again.
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
MOECOMM_FN void store_shared(u32 address, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// The 8 values of a word as e4m3.  `magnitudes`: of its rise.
MOECOMM_FN uint2 to_e4m3(u32 word, const uint2& magnitudes) {
    constexpr u32 kSigns = 0x80808080u;
    const u32 places = word & 0x77777777u;
    return make_uint2(look_up(magnitudes.x, magnitudes.y, places) | (word & kSigns),
                      look_up(magnitudes.x, magnitudes.y, places >> 16) | (word << 4 & kSigns));
}

// Barriers, scales and the table of magnitudes of the packed ring.  Empty without packed weights.
template <GemmConfig c, bool = c.widens()>
struct Widening {
    MOECOMM_FN void init() {}
};
template <GemmConfig c>
struct Widening<c, true> {
    static constexpr i32 kHalf = c.block_columns() / 2;
    static_assert(c.scaled() && c.depth() == kScaleGroup && c.block_columns() == 2 * kScaleGroup, "a step is a block of scales deep");

    // Barriers of the slots of the packed ring.  `full`: two arrivals of the loader, for weights and for scales, and the bytes of both;
    // `empty`: an arrival of each warp of one widening warpgroup.
    u64 full[c.packed_stages], empty[c.packed_stages];
    u32 magnitudes[kRises][2];
    alignas(16) u32 scales[c.packed_stages][c.block_columns()];  // with GemmConfig::apart those of gate rows, then those of up rows

    // One thread; barrier_init_done() and a block or cluster barrier must follow.
    MOECOMM_FN void init() {
        for (i32 s = 0; s < c.packed_stages; ++s) {
            barrier_init(&full[s], 2);
            barrier_init(&empty[s], kWideningWarps);
        }
        for (i32 rise = 0; rise < kRises; ++rise) {
            magnitudes[rise][0] = low_magnitudes(rise);
            magnitudes[rise][1] = high_magnitudes(rise);
        }
    }
};

// Loads the packed weights of a tile and their scales.  Called by one thread.  Each slot is loaded after its `empty` barrier completes.
// Rows beyond the end of w have no scales; their products are not stored.  Cannot fail.
template <GemmConfig c, bool apart>
MOECOMM_FN void load_packed(Ring<c>& ring, Widening<c>& packed, const GemmArgs& args, const Tile& tile, i32 block,
                            Place<c.packed_stages>& place) {
    constexpr i32 kRows = apart ? Widening<c>::kHalf : c.block_columns();  // of one copy of scales
    const i32 steps = ceil_div(args.depth, c.depth()), half = args.columns / 2, first = block * kRows;
    const i32 bytes = 4 * min(kRows, (apart ? half : args.columns) - first);
    const u64 keep = tile.only_row_tile ? kKeepLeast : kKeepNormal;
    const u32* scales = reinterpret_cast<const u32*>(args.w_scales) + static_cast<i64>(tile.group) * steps * args.columns + first;
    for (i32 step = 0; step < steps; ++step, scales += args.columns, place.step()) {
        u64* const full = &packed.full[place.slot];
        const u32 to = shared_address(ring.packed[place.slot]);
        copy_wait(&packed.empty[place.slot], place.phase ^ 1);
        expect_bytes(full, c.packed_bytes());
        if constexpr (apart) {
            load_pairs(to, args.w, step * kPackedWords, block * (c.block_columns() / (2 * kWoven)), tile.group, full, keep);
        } else {
            load_box(to, args.w, step * kPackedWords, first / kWoven, tile.group, full, keep);
        }
        u32* const of_rows = packed.scales[place.slot];
        if (bytes <= 0) {
            arrive(full);
        } else if constexpr (apart) {
            bulk_load_both(of_rows, scales, bytes, of_rows + kRows, scales + half, bytes, full);
        } else {
            bulk_load(of_rows, scales, bytes, full);
        }
    }
}

// A lane's part of the widening: 32 columns of every eighth of the warp's 64 rows of w.
template <GemmConfig c, bool apart>
struct WideningLane {
    static constexpr i32 kRows = c.block_columns() / kWideningWarps, kTurns = kRows / 8, kTogether = 2;

    u32 from, to, scales, magnitudes;  // addresses in shared memory: of the lane's first row in the first slots
    i32 turn;                          // of a word of scales, so that the rise is an offset into the table

    MOECOMM_FN WideningLane(const Ring<c>& ring, const Widening<c>& packed) {
        const i32 warp = warp_id() % kWideningWarps, lane = lane_id(), group = lane % 4, row = warp * kRows + lane / 4;
        from = shared_address(ring.packed[0]) + row * kPackedRowBytes + group * 16;
        to = shared_address(ring.w[0]) + row * kSlotRowBytes + ((2 * group) ^ (lane / 4)) * 16;
        scales = shared_address(packed.scales[0]) + (apart ? warp * (kRows / 2) + lane / 4 : row) * 4;
        magnitudes = shared_address(packed.magnitudes[0]);
        turn = (4 * group - 3) & 31;
    }
    // The magnitudes of the lane's columns in row 8 * `nth` of its rows.
    MOECOMM_FN uint2 magnitudes_of(i32 slot, i32 nth) const {
        const i32 at = apart ? nth % 2 * Widening<c>::kHalf + nth / 2 * kWoven : nth * kWoven;
        const u32 word = load_shared_word(scales + slot * (c.block_columns() * 4) + at * 4);
        return load_shared_words(magnitudes + (__funnelshift_r(word, word, turn) & (kRises - 1) * 8));
    }
    MOECOMM_FN uint4 packed_of(i32 slot, i32 nth) const {
        return load_shared(from + slot * c.packed_bytes() + nth * (8 * kPackedRowBytes));
    }
    // Rows are 8 from each other, so their swizzle is the same; the second 16 bytes are the neighbors of the first.
    MOECOMM_FN void store(i32 slot, i32 nth, const uint4& words, const uint2& of_rise) const {
        const u32 at = to + slot * c.weight_bytes() + nth * (8 * kSlotRowBytes);
        const uint2 first[2] = {to_e4m3(words.x, of_rise), to_e4m3(words.y, of_rise)};
        store_shared(at, make_uint4(first[0].x, first[0].y, first[1].x, first[1].y));
        const uint2 second[2] = {to_e4m3(words.z, of_rise), to_e4m3(words.w, of_rise)};
        store_shared(at ^ 16, make_uint4(second[0].x, second[0].y, second[1].x, second[1].y));
    }
};

// Position of a widening warpgroup: slots of both rings, and how many steps are left to its next one.  Warpgroups take steps in turn, so
// that one widens while the other waits for barriers or for its stores.
template <GemmConfig c>
struct WideningPlace {
    RingPlace<c> to;
    Place<c.packed_stages> from;
    i32 ahead = static_cast<i32>(uniform(threadIdx.x / kWarpgroup)) - kGemmThreads / kWarpgroup;

    MOECOMM_FN void step() {
        to.step();
        from.step();
        ahead = ahead == 0 ? c.widening_groups() - 1 : ahead - 1;
    }
};

// Widens the weights of a tile into the ring, slot after slot.  Called by the widening warps.  Each waits for `full` of a packed slot and
// for `empty` of a slot of the ring, as its loader does, and then arrives at the other two barriers.  Cannot fail.
//
// Order: lanes write in the generic proxy what wgmma reads in the async proxy, so each lane fences before its warp arrives.
template <GemmConfig c, bool apart>
MOECOMM_FN void widen_tile(Ring<c>& ring, RingBarriers<c>& barriers, RingScales<c>& scales, Widening<c>& packed, i32 steps,
                           WideningPlace<c>& at) {
    using Lane = WideningLane<c, apart>;
    const Lane mine(ring, packed);
    const i32 warp = warp_id() % kWideningWarps, lane = lane_id();
#pragma unroll 1
    for (i32 step = 0; step < steps; ++step, at.step()) {
        if (at.ahead > 0) continue;
        const auto place = at.to;
        const auto from = at.from;
        copy_wait(&packed.full[from.slot], from.phase);
        // The next rows are loaded while these are widened.
        uint4 words[2][Lane::kTogether];
        uint2 of_rise[2][Lane::kTogether];
#pragma unroll
        for (i32 i = 0; i < Lane::kTogether; ++i) {
            words[0][i] = mine.packed_of(from.slot, i);
            of_rise[0][i] = mine.magnitudes_of(from.slot, i);
        }
        copy_wait(&barriers.empty[place.slot], place.phase ^ 1);
#pragma unroll
        for (i32 nth = 0; nth < Lane::kTurns; nth += Lane::kTogether) {
            const i32 now = nth / Lane::kTogether % 2;
#pragma unroll
            for (i32 i = 0; i < Lane::kTogether; ++i) {
                if (const i32 next = nth + Lane::kTogether + i; next < Lane::kTurns) {
                    words[1 - now][i] = mine.packed_of(from.slot, next);
                    of_rise[1 - now][i] = mine.magnitudes_of(from.slot, next);
                }
            }
#pragma unroll
            for (i32 i = 0; i < Lane::kTogether; ++i) mine.store(place.slot, nth + i, words[now][i], of_rise[now][i]);
        }
        if (lane < 2) {  // the factors of the warp's rows, or with GemmConfig::apart of its gate rows and its up rows
            const i32 row = apart ? lane * Widening<c>::kHalf + warp * (Lane::kRows / 2) : warp * Lane::kRows;
            scales.slots[place.slot][2 * warp + lane] = __uint_as_float(packed.scales[from.slot][row] & 0xffff0000u);
        }
        fence_async_shared();
        __syncwarp();
        if (lane == 0) {
            arrive(&barriers.full[place.slot]);
            arrive(&packed.empty[from.slot]);
        }
    }
}

}  // namespace moecomm
