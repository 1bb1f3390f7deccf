// all_reduce of a matrix that every rank has, in one launch of two trips over the links: the second half of matmul_all_reduce where a
// product of torch is the first.
//
// The matrix is cut into parts of one step of a warp: four lines of packets (device/packet.cuh). Part p belongs to rank p % ranks. Each
// warp first sends parts of this rank to their owners; then it takes parts that this rank owns, adds up those of all ranks in float32 and
// in rank order, rounds the sum, and sends it to all; last it receives sums. Lines carry the round's tag: no fence, no flag, and every rank
// gets the same bits.
//
// Bytes on the link: 2 * (ranks - 1) / ranks of the matrix, with 15 of 16 words used.
//
// A warp waits only for what other ranks send before they wait for it: parts wait for nothing, sums wait for parts. All blocks of a launch
// are resident at once.
#pragma once
#include "../device/packet.cuh"
#include "round.cuh"
#include "vectors.cuh"

namespace moecomm {

template <Type type, i32 ranks>
struct AllReduce {
    static constexpr i32 words = kAllReduceWords, bytes = kAllReduceBytes;
    static_assert(words == kStepLines * kLineWords && bytes == kStepLines * kLineBytes, "a part is one step of a warp");

    const AllReduceArgs& a;
    const OverlapRound& round;
    i32 parts = static_cast<i32>(ceil_div(a.words, static_cast<i64>(words)));
    i32 owned = ceil_div(parts, ranks);  // of a rank, at most
    i32 warps = static_cast<i32>(gridDim.x * blockDim.x / kWarp);
    i32 first = static_cast<i32>(threadIdx.x / kWarp * gridDim.x + blockIdx.x);  // neighbors on other multiprocessors

    // Where `source`'s part lies at its owner `of`, and where the sum of a part lies at any rank.
    MOECOMM_FN u8* part_at(i32 of, i32 part, i32 source) const {
        return reinterpret_cast<u8*>(round.packets(of)) + static_cast<i64>(part / ranks * ranks + source) * bytes;
    }
    MOECOMM_FN u8* sum_at(i32 of, i32 part) const {
        return reinterpret_cast<u8*>(round.packets(of)) + static_cast<i64>(owned * ranks + part) * bytes;
    }

    // This lane's words of a part, 0 behind the end of the matrix. x is not written during this launch.
    MOECOMM_FN ulonglong2 load(i32 part) const {
        const i64 at = static_cast<i64>(part) * words + packet_word(0);
        const u64* const from = reinterpret_cast<const u64*>(a.x) + at;
        return make_ulonglong2(at < a.words ? from[0] : 0, !ends_line() && at + 1 < a.words ? from[1] : 0);
    }
    MOECOMM_FN void store(i32 part, const ulonglong2& held) const {
        const i64 at = static_cast<i64>(part) * words + packet_word(0);
        u64* const to = reinterpret_cast<u64*>(a.out) + at;
        if (at < a.words) to[0] = held.x;
        if (!ends_line() && at + 1 < a.words) to[1] = held.y;
    }

    // Waits for a packet of each of `count` ranks, and loads this lane's words of them; that of rank `mine` is there already. A whole warp.
    // False on failure.
    template <i32 count, class Packet>
    MOECOMM_FN bool receive(const Packet& packet, i32 first_rank, i32 mine, i32 part, ulonglong2 (&held)[count]) const {
        const u64 tag = line_tag(static_cast<u32>(round.number));
        const Deadline limit = round.deadline();
        for (Polls polls(limit);;) {
            i32 missing = -1;
#pragma unroll
            for (i32 i = 0; i < count; ++i) {
                if (i != mine) held[i] = load_line_words(packet(i) + lane_id() * 16);
                if (i != mine && ends_line() && held[i].y != tag) missing = i;
            }
            if (__all_sync(kAllLanes, missing < 0)) return true;
            const Waited waited = polls.pause();
            if (!__any_sync(kAllLanes, waited != Waited::ok)) continue;
            if (waited != Waited::ok && missing >= 0) round.fail(waited, first_rank + missing, part, 0);
            return false;
        }
    }

    // The sum of a part, in rank order. Lanes that end a line have its tag in their second word, which nobody stores.
    MOECOMM_FN ulonglong2 sum(const ulonglong2 (&held)[ranks]) const {
        float sums[8] = {};
#pragma unroll
        for (i32 rank = 0; rank < ranks; ++rank) {
            const ulonglong2& of = held[rank];
            add_eight<type>(sums, make_uint4(static_cast<u32>(of.x), static_cast<u32>(of.x >> 32), static_cast<u32>(of.y),
                                             static_cast<u32>(of.y >> 32)));
        }
        const uint4 rounded = narrow_all<type>(sums);
        return make_ulonglong2(rounded.x | static_cast<u64>(rounded.y) << 32, rounded.z | static_cast<u64>(rounded.w) << 32);
    }

    // Sends this rank's parts to their owners, to the next rank first. Waits for nothing.
    MOECOMM_FN void send_parts() const {
        for (i32 item = first; item < owned * (ranks - 1); item += warps) {
            const i32 owner = (round.rank() + 1 + item % (ranks - 1)) % ranks, part = item / (ranks - 1) * ranks + owner;
            if (part >= parts) continue;
            store_step(part_at(owner, part, round.rank()), kStepLines, 0, load(part), static_cast<u32>(round.number));
        }
    }
    // Adds up the parts that this rank owns, and sends the sums. False on failure.
    MOECOMM_FN bool reduce_parts() const {
        for (i32 part = first * ranks + round.rank(); part < parts; part += warps * ranks) {
            ulonglong2 held[ranks];
            const ulonglong2 mine = load(part);
#pragma unroll
            for (i32 source = 0; source < ranks; ++source) held[source] = mine;
            const auto packet = [&](i32 source) { return part_at(round.rank(), part, source); };
            if (!receive(packet, 0, round.rank(), part, held)) return false;
            const ulonglong2 total = sum(held);
            for (i32 i = 1; i < ranks; ++i) {
                const i32 to = (round.rank() + i) % ranks;
                store_step(sum_at(to, part), kStepLines, 0, total, static_cast<u32>(round.number));
            }
            store(part, total);
        }
        return true;
    }
    // Receives the sums of parts that others own.
    MOECOMM_FN void receive_sums() const {
        for (i32 item = first; item < owned * (ranks - 1); item += warps) {
            const i32 owner = (round.rank() + 1 + item % (ranks - 1)) % ranks, part = item / (ranks - 1) * ranks + owner;
            if (part >= parts) continue;
            ulonglong2 held[1];
            if (!receive([&](i32) { return sum_at(round.rank(), part); }, owner, -1, part, held)) return;
            store(part, held[0]);
        }
    }
};

// The kernel: all threads of all blocks, at most one block a multiprocessor. All waits have the Window's deadline.
template <Type type, i32 ranks>
MOECOMM_FN void all_reduce(const AllReduceArgs& a) {
    await_earlier_kernels();
    launch_dependents();
    const OverlapRound round(a.overlap);
    const AllReduce<type, ranks> all{a, round};
    if constexpr (ranks > 1) all.send_parts();
    if (all.reduce_parts()) {
        if constexpr (ranks > 1) all.receive_sums();
    }
    round.end();
}

}  // namespace moecomm
