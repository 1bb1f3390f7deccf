// Products whose depth is split over the blocks of a cluster, for few tiles: with as many blocks as multiprocessors each reads its part of
// w.
//
// Every block multiplies its part of the depth of the same tile, and leaves its sums in its shared memory. Of each 8 * split rows a block
// then adds up 8, over all blocks in their order, and stores them. So the bits depend on the number of blocks alone.
//
// Order: the math warps of all blocks arrive at `written` of each block (release at cluster scope, after __syncwarp), and read the sums of
// other blocks after it completes (acquire). They arrive at `read` after their last load; a block writes its next sums after that. All
// math warps of a cluster have the same tiles, so no wait can fail.
#pragma once
#include "../gemm/gemm.cuh"

namespace moecomm {

template <GemmConfig c, i32 split>
struct SplitSums {
    float4 sums[c.most_rows / 8][kMathGroups * kWarpgroup];  // of each math thread: of rows 8 j to 8 j + 7 of the tile
    u64 written, read;

    MOECOMM_FN void init() {
        barrier_init(&written, split * kMathGroups * kWarpgroup / kWarp);
        barrier_init(&read, split * kMathGroups * kWarpgroup / kWarp);
    }
};
template <GemmConfig c>
struct SplitSums<c, 1> {
    MOECOMM_FN void init() {}
};

template <i32 split>
MOECOMM_FN i32 place_in_split() {
    return split == 1 ? 0 : cluster_rank();
}

// Steps of the depth that this block multiplies; maybe none.
template <GemmConfig c, i32 split>
MOECOMM_FN Steps my_steps(const GemmArgs& args) {
    const Steps all = all_steps<c>(args);
    if constexpr (split == 1) return all;
    const i32 mine = cluster_rank();
    return {mine * all.end / split, (mine + 1) * all.end / split};
}

// Arrives at the barrier at the same place in block `rank` of the cluster. One thread. Releases at cluster scope.
MOECOMM_FN void release_at(u64* barrier, i32 rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n\t"
        "}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}
// Waits for a phase of a barrier of this block. Acquires at cluster scope.
MOECOMM_FN void acquire_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
// Loads what is at the same place in block `rank` of the cluster.
MOECOMM_FN float4 load_of_block(const float4* from, i32 rank) {
    float4 v;
    asm volatile(
        "{\n\t"
        ".reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %4, %5;\n\t"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n\t"
        "}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(shared_address(from)), "r"(rank)
        : "memory");
    return v;
}

// Replaces the sums of the rows that this block stores by those over all blocks. All threads of both math warpgroups of all blocks.
// `phase`: 0 for the first tile, and changed by every call.
template <GemmConfig c, i32 split, i32 size>
MOECOMM_FN void add_blocks(SplitSums<c, split>& s, float (&accum)[size], u32& phase) {
    constexpr i32 eights = c.most_rows / 8, mine = eights / split;
    static_assert(!c.scaled() && 8 * mine * split == c.most_rows && 2 * size == c.most_rows, "as many rows for each block");
    const i32 thread = threadIdx.x - kWarpgroup, rank = cluster_rank();
    acquire_wait(&s.read, phase ^ 1);
#pragma unroll
    for (i32 j = 0; j < eights; ++j) s.sums[j][thread] = make_float4(accum[4 * j], accum[4 * j + 1], accum[4 * j + 2], accum[4 * j + 3]);
    __syncwarp();
    if (lane_id() < split) release_at(&s.written, lane_id());
    acquire_wait(&s.written, phase);
    float4 total[mine];
#pragma unroll
    for (i32 i = 0; i < mine; ++i) total[i] = load_of_block(&s.sums[i * split + rank][thread], 0);
#pragma unroll 1
    for (i32 from = 1; from < split; ++from) {
        float4 part[mine];
#pragma unroll
        for (i32 i = 0; i < mine; ++i) part[i] = load_of_block(&s.sums[i * split + rank][thread], from);
#pragma unroll
        for (i32 i = 0; i < mine; ++i) {
            total[i].x = __fadd_rn(total[i].x, part[i].x), total[i].y = __fadd_rn(total[i].y, part[i].y);
            total[i].z = __fadd_rn(total[i].z, part[i].z), total[i].w = __fadd_rn(total[i].w, part[i].w);
        }
    }
    __syncwarp();
    if (lane_id() < split) release_at(&s.read, lane_id());
#pragma unroll
    for (i32 j = 0; j < eights; ++j) {
        if (j % split != rank) continue;
        const float4& sum = total[j / split];
        accum[4 * j] = sum.x, accum[4 * j + 1] = sum.y, accum[4 * j + 2] = sum.z, accum[4 * j + 3] = sum.w;
    }
    phase ^= 1;
}

// Store policy: the rows of the tile that this block adds up.
template <i32 split, class Out>
struct StoreMine {
    Out out;
    i32 first_row;  // of the tile

    MOECOMM_FN void store(i32 row, i32 column, const uint4& values) const {
        if ((row - first_row) / 8 % split == cluster_rank()) out.store(row, column, values);
    }
};
template <i32 split, class Out>
MOECOMM_FN auto store_mine(const Out& out, i32 first_row) {
    if constexpr (split == 1) {
        return out;
    } else {
        return StoreMine<split, Out>{out, first_row};
    }
}

}  // namespace moecomm
