// Differences between the compilers of this folder (NVRTC, nvcc and g++). No CUDA or std header is included from here.
#pragma once

#if defined(__CUDACC__)
#define MOECOMM_DEVICE 1
#define MOECOMM_FN __device__ __forceinline__
#define MOECOMM_BOTH __host__ __device__ __forceinline__
#else
#define MOECOMM_DEVICE 0
#define MOECOMM_FN inline
#define MOECOMM_BOTH inline
#endif

namespace moecomm {

using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "the window layout counts on these widths");

constexpr i32 kMaxRanks = 64;       // of kernels: peer addresses travel inside the argument structs, and sets of ranks are words
constexpr i32 kMaxHostRanks = 256;  // of the host executor
constexpr i32 kMaxTopk = 32;        // one lane of a warp for each entry
constexpr i32 kMaxChunk = 32;       // tokens; chunks are powers of two, so that any chunk size divides every multiple of this
constexpr i32 kMaxBlocks = 256;     // blocks of a launch

template <class T>
MOECOMM_BOTH constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}
template <class T>
MOECOMM_BOTH constexpr T align_up(T a, T b) {
    return ceil_div(a, b) * b;
}

}  // namespace moecomm
