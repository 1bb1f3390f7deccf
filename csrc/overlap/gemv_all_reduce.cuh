// matmul_all_reduce of at most 16 rows in one launch. Time is that of reading w once and of one trip over the links.
//
// A block has kGemvGroups groups of warps, which work on their own. A group takes 16 columns of the result at a time (16 rows of w, a
// unit). Its warps share the depth, read w past L1, 16 bytes a lane, and multiply on tensor cores (mma.sync); their sums are added up in
// shared memory, in the order of warps. The group rounds the sums and stores them on every rank, in packets (device/packet.cuh) whose lines
// carry the round's tag: no fence, no flag. After its last unit it waits for the packets of all ranks, adds up in rank order, and stores.
// So every rank reduces everything (one shot), and the bits are the same on all of them.
//
// Bytes on the link: (ranks - 1) * rows * columns * 2, with 15 of 16 words used: 5 us for 16 rows of 16384 columns on 4 ranks, hidden
// behind w; two-shot would halve them for a second trip of 1.5 us.
#pragma once
#include "../device/packet.cuh"
#include "round.cuh"
#include "vectors.cuh"

namespace moecomm {

constexpr i32 kGemvGroupThreads = kGemvWarps * kWarp;
constexpr i32 kGemvStep = 32;  // columns of w that a warp multiplies at once: 8 a lane
static_assert(kOverlapRanks <= kGemvWarps, "a warp for each rank");

// 16 bytes that this launch reads once.
MOECOMM_FN uint4 load_streamed(u64 from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}
// d[16][8] += a[16][16] b[16][8]^T. A whole warp; lane l holds, with g = l / 4 and t = l % 4,
//   a: row g, columns 2t, 2t+1; row g + 8, the same; row g, columns 2t+8, 2t+9; row g + 8, the same
//   b: row g, columns 2t, 2t+1; columns 2t+8, 2t+9
//   d: row g, columns 2t, 2t+1; row g + 8, the same.
template <Type type>
MOECOMM_FN void multiply_small(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (type == Type::bf16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

// `most`: rows of x, 8 or 16.
template <i32 most>
struct GemvUnit {
    static constexpr i32 lines = gemv_lines(most), words = lines * kLineWords;  // of a packet; words of 64 bits
    static constexpr i32 steps = ceil_div(lines, kStepLines);                   // stores of a warp
};
template <i32 most, i32 ranks>
struct GemvShared {
    union Group {
        float sums[kGemvWarps][most][kGemvColumns];
        u64 packets[ranks][GemvUnit<most>::words];
    };
    Group groups[kGemvGroups];
    u64 packet[kGemvGroups][GemvUnit<most>::words];  // to be sent
};

// One group of warps of a block.
template <Type type, i32 most, i32 ranks>
struct GemvGroup {
    using Unit = GemvUnit<most>;
    static constexpr i32 together = most == 8 ? 4 : 2;  // steps whose loads are in flight

    const GemvArgs& a;
    const OverlapRound& round;
    GemvShared<most, ranks>& s;
    i32 group = static_cast<i32>(threadIdx.x) / kGemvGroupThreads, warp = warp_id() % kGemvWarps;
    i32 thread = static_cast<i32>(threadIdx.x) % kGemvGroupThreads;

    MOECOMM_FN void sync() const { barrier_sync(1 + group, kGemvGroupThreads); }
    MOECOMM_FN i32 units() const { return ceil_div(a.columns, kGemvColumns); }
    MOECOMM_FN i32 first_unit() const { return group * gridDim.x + blockIdx.x; }  // neighbors on other multiprocessors
    MOECOMM_FN i32 unit_step() const { return kGemvGroups * gridDim.x; }
    // The packet of a unit from `source`, on a rank.
    MOECOMM_FN u8* packet_at(i32 of, i32 unit, i32 source) const {
        return reinterpret_cast<u8*>(round.packets(of)) + static_cast<i64>(unit * ranks + source) * Unit::lines * kLineBytes;
    }

    // This warp's part of the products of a unit, to shared memory. Lane l multiplies columns 8 (l % 4) to 8 (l % 4) + 7 of each step: the
    // order of columns inside a step does not matter, as long as w and x have the same.
    MOECOMM_FN void multiply(i32 unit) const {
        constexpr i32 halves = most / 8;
        const i32 g = lane_id() / 4, t = lane_id() % 4, row = unit * kGemvColumns + g;
        const i64 pitch = static_cast<i64>(a.depth) * 2;
        const u64 first = a.w + min(row, a.columns - 1) * pitch, second = a.w + min(row + 8, a.columns - 1) * pitch;
        const u64 x = a.x + g * pitch;
        float sums[halves][4] = {};
        for (i32 k = warp * together * kGemvStep + 8 * t; k - 8 * t < a.depth; k += kGemvWarps * together * kGemvStep) {
            uint4 w[together][2], of_x[together][halves];
#pragma unroll
            for (i32 i = 0; i < together; ++i) {
                const i32 column = k + i * kGemvStep;
                const bool inside = column < a.depth;
                w[i][0] = inside ? load_streamed(first + column * 2) : make_uint4(0, 0, 0, 0);
                w[i][1] = inside ? load_streamed(second + column * 2) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (i32 half = 0; half < halves; ++half)
                    of_x[i][half] = inside && g + 8 * half < a.rows ? *reinterpret_cast<const uint4*>(x + 8 * half * pitch + column * 2)
                                                                    : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (i32 i = 0; i < together; ++i) {
#pragma unroll
                for (i32 half = 0; half < halves; ++half) {
                    multiply_small<type>(sums[half], w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y, of_x[i][half].x, of_x[i][half].y);
                    multiply_small<type>(sums[half], w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w, of_x[i][half].z, of_x[i][half].w);
                }
            }
        }
#pragma unroll
        for (i32 half = 0; half < halves; ++half)
#pragma unroll
            for (i32 i = 0; i < 4; ++i) s.groups[group].sums[warp][8 * half + 2 * t + i % 2][g + i / 2 * 8] = sums[half][i];
    }

    // Adds up the warps' sums, and rounds them into the packet to be sent.
    MOECOMM_FN void make_packet() const {
        for (i32 pair = thread; pair < most * kGemvColumns / 2; pair += kGemvGroupThreads) {
            const i32 row = pair / (kGemvColumns / 2), column = pair % (kGemvColumns / 2) * 2;
            float both[2] = {};
#pragma unroll
            for (i32 from = 0; from < kGemvWarps; ++from) {
                both[0] = __fadd_rn(both[0], s.groups[group].sums[from][row][column]);
                both[1] = __fadd_rn(both[1], s.groups[group].sums[from][row][column + 1]);
            }
            reinterpret_cast<u32*>(s.packet[group])[pair] = narrow_word<type>(both);
        }
    }
    // Each warp stores the packet on one rank.
    MOECOMM_FN void send(i32 unit) const {
        if (warp >= ranks) return;
        const i32 to = (round.rank() + 1 + warp) % ranks;
        u8* const packet = packet_at(to, unit, round.rank());
#pragma unroll
        for (i32 step = 0; step < Unit::steps; ++step) {
            const u64* const from = s.packet[group] + packet_word(step);
            ulonglong2 words = make_ulonglong2(0, 0);
            if (packet_line(step) < Unit::lines) words = make_ulonglong2(from[0], ends_line() ? 0 : from[1]);
            store_step(packet, Unit::lines, step, words, static_cast<u32>(round.number));
        }
    }
    // Each warp waits for the packet of one rank, and copies it to shared memory. False on failure.
    MOECOMM_FN bool receive(i32 unit) const {
        if (warp >= ranks) return true;
        const u8* const packet = packet_at(round.rank(), unit, warp);
        PacketWords words;
        const Deadline limit = round.deadline();
        Waited waited = Waited::ok;
        for (Polls polls(limit); !poll_packet(packet, Unit::lines, static_cast<u32>(round.number), words);) {
            waited = polls.pause();
            if (__any_sync(kAllLanes, waited != Waited::ok)) {
                if (waited != Waited::ok) round.fail(waited, warp, unit, 0);
                return false;
            }
        }
#pragma unroll
        for (i32 step = 0; step < Unit::steps; ++step) {
            if (packet_line(step) >= Unit::lines) continue;
            u64* const to = s.groups[group].packets[warp] + packet_word(step);
            to[0] = words.step[step].x;
            if (!ends_line()) to[1] = words.step[step].y;
        }
        return true;
    }
    // Adds up the packets of all ranks, in rank order, and stores the result.
    MOECOMM_FN void reduce(i32 unit) const {
        for (i32 pair = thread; pair < most * kGemvColumns / 2; pair += kGemvGroupThreads) {
            const i32 row = pair / (kGemvColumns / 2), column = unit * kGemvColumns + pair % (kGemvColumns / 2) * 2;
            if (row >= a.rows || column >= a.columns) continue;
            float both[2] = {};
#pragma unroll
            for (i32 rank = 0; rank < ranks; ++rank) {
                float part[2];
                widen_word<type>(reinterpret_cast<const u32*>(s.groups[group].packets[rank])[pair], part);
                both[0] = __fadd_rn(both[0], part[0]), both[1] = __fadd_rn(both[1], part[1]);
            }
            reinterpret_cast<u32*>(a.out)[(static_cast<i64>(row) * a.columns + column) / 2] = narrow_word<type>(both);
        }
    }
};

// The kernel: all threads of all blocks, at most one block a multiprocessor. All waits have the Window's deadline.
template <Type type, i32 most, i32 ranks>
MOECOMM_FN void gemv_all_reduce(const GemvArgs& a) {
    extern __shared__ __align__(128) u8 memory[];
    auto& s = *reinterpret_cast<GemvShared<most, ranks>*>(memory);
    static_assert(sizeof(GemvShared<most, ranks>) <= gemv_shared_bytes(most), "what is launched");
    await_earlier_kernels();
    launch_dependents();
    const OverlapRound round(a.overlap);
    const GemvGroup<type, most, ranks> group{a, round, s};
    for (i32 unit = group.first_unit(); unit < group.units(); unit += group.unit_step()) {
        group.multiply(unit);
        group.sync();
        group.make_packet();
        group.sync();
        group.send(unit);
    }
    group.sync();  // all have read the last sums
    bool failed = false;
    for (i32 unit = group.first_unit(); unit < group.units(); unit += group.unit_step()) {
        failed = barrier_sync_any(1 + group.group, kGemvGroupThreads, failed || !group.receive(unit));
        if (failed) break;
        group.reduce(unit);
        group.sync();
    }
    round.end();
}

}  // namespace moecomm
