// C = A B in float16, as a program of its own would compute it over a moecomm.Window: A [ranks * rows, depth] lies at byte 0 of the
// windows, `rows` of it on each rank; B [depth, columns] and C [ranks * rows, columns] are local, and every rank computes all of C.
// docs/maintainers/all_gather_matmul_study.md tells what the kernels show. moecomm_bench/gather_kernels.py compiles and launches them;
// arguments have 64 bits.
#include <moecomm/window.cuh>

namespace {

using Half = unsigned short;  // the bits of a float16
constexpr int kThreads = 256, kBlocks = 4, kTile = 16;

__device__ float to_float(Half value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
    return result;
}
__device__ Half to_half(float value) {
    Half result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

// An element of C: a row of A by a column of B, whose elements are `columns` apart. Called by any thread.
__device__ Half dot(const Half* a, const Half* b, long long columns, long long depth) {
    float sum = 0;
    for (long long k = 0; k < depth; ++k) sum += to_float(a[k]) * to_float(b[k * columns]);
    return to_half(sum);
}

}  // namespace

// Each thread computes one element of C, and reads its row of A from the owner on every access. A block has a tile of kTile x kTile
// elements. No wait: the caller's barriers say when rows are written and read.
extern "C" __global__ void __launch_bounds__(kThreads)
    naive_remote_read(const moecomm::Window* handle, const Half* b, Half* c, long long rows, long long columns, long long depth) {
    const moecomm::Window window = *handle;
    const long long tiles = (columns + kTile - 1) / kTile;
    const long long row = blockIdx.x / tiles * kTile + threadIdx.x / kTile, column = blockIdx.x % tiles * kTile + threadIdx.x % kTile;
    if (row >= window.ranks * rows || column >= columns) return;
    const Half* a = window.peer<const Half>(static_cast<int>(row / rows), row % rows * depth * sizeof(Half));
    c[row * columns + column] = dot(a, b + column, columns, depth);
}

// Blocks gather rows of A into local memory, and multiply what they have gathered. Row i belongs to block i % gridDim.x on every rank, so
// that equal blocks of all ranks meet; all blocks are resident, and depth is a multiple of 8.
//
//   signal row                 of every rank: calls in which the owner has let others read the row
//   signal ranks * rows + row  of the owner: reads of the row by other ranks, over all calls
//   turns[block]               calls of the block before this one: kept on the device, because a graph repeats arguments
//
// With columns = 0 the rows are only gathered.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    gather_rows(const moecomm::Window* handle, unsigned long long* turns, Half* gathered, const Half* b, Half* c, long long rows,
                long long columns, long long depth) {
    const moecomm::Window window = *handle;
    const moecomm::CoopBlock block;
    const int all_rows = static_cast<int>(window.ranks * rows), thread = threadIdx.x;
    const unsigned long long turn = turns[blockIdx.x] + 1;
    for (int row = blockIdx.x; row < all_rows; row += gridDim.x) {
        const int owner = static_cast<int>(row / rows);
        if (owner != window.rank) {
            if (!window.wait(block, row, turn, owner)) return;
        } else if (thread < window.ranks && thread != window.rank) {
            window.set_signal(thread, row, turn);
        }
        const auto* from = window.peer<const uint4>(owner, row % rows * depth * sizeof(Half));
        auto* to = reinterpret_cast<uint4*>(gathered + row * depth);
        for (int i = thread; i < depth / 8; i += kThreads) to[i] = from[i];
        block.sync();
        if (owner != window.rank && thread == 0) window.signal(owner, all_rows + row);
        for (long long column = thread; column < columns; column += kThreads)
            c[row * columns + column] = dot(gathered + row * depth, b + column, columns, depth);
        if (owner == window.rank && !window.wait(block, all_rows + row, (window.ranks - 1) * turn)) return;
    }
    if (thread == 0) turns[blockIdx.x] = turn;
}
