// The part of CUDA that kernels use, for g++: every thread is a fiber (scheduler.cpp), and lanes meet in the operations of their warp.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

struct Index {
    unsigned x;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct int2 {
    int x, y;
};
struct ulonglong2 {
    unsigned long long x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

namespace emulator {

struct PacketLine {
    unsigned char bytes[2][128];  // by operations of its lanes in turn
    unsigned arrived[2];          // lanes, of all such operations
};
struct Warp {
    std::uint64_t value[2][32];  // of each lane, by operations of the warp in turn
    unsigned arrived[2];         // lanes, of all such operations
    PacketLine lines[4];         // by eight lanes
};
struct Barrier {
    unsigned arrived, generation, any, result;
};
// State of one launch.
struct Launched {
    int rank;                // 0 to n - 1: the first launches of a run are of ranks in this order
    const Launched* before;  // in its stream; none: nullptr
    bool early;              // it begins when all blocks of that let it
    unsigned threads, ended;
    unsigned blocks, letting;  // those that let the next launch begin

    bool may_begin() const { return before == nullptr || (early && before->letting == before->blocks) || before->ended == before->threads; }
};
struct Block {
    Launched* launch;
    bool lets_next;
    unsigned threads, ended;
    Barrier barriers[16];
    unsigned char* shared;
    unsigned char* mbarriers;  // 1 for every 8 bytes of it where one has been
};
struct Thread {
    Index thread, block, grid;
    Block* of_block;
    Warp* warp;
    unsigned operations;   // of the warp, that this lane has come to
    unsigned lines;        // that this lane has stored and loaded
    std::uint64_t steps;   // with MOECOMM_COUNTED: basic blocks that it has run, but for polls in vain
    std::uint64_t polled;  // steps at the first poll in vain of its last wait
};

extern "C" {
extern Thread* emulator_thread;  // that is running
// Let others run: for a while, until *word has come to `least`, until it has changed from `was`.
void emulator_yield();
void emulator_wait(const unsigned* word, unsigned least);
void emulator_wait_change(const unsigned* word, unsigned was);
// Traffic to another domain: puts in any order, an add after all before it on its way.
void emulator_put(int rank, int peer, int channel, void* to, const void* from, std::uint64_t bytes);
void emulator_add(int rank, int peer, int channel, unsigned long long* word, unsigned long long amount);
// Wait until all puts of the rank so far have arrived.
void emulator_quiet(int rank);
// Address in a peer's window of what is at `local` in that of the rank.
void* emulator_address(int rank, int peer, const void* local);
// Count a line of a packet that a rank has stored.
void emulator_count_line(int rank);
// For tests: flips a bit of the copy whose turn it is, once emulator_flip_in was set to its number.
void emulator_flip(void* to, const void* from, int bytes);
}

#ifdef MOECOMM_COUNTED
// Called by g++'s code at the start of each basic block.
extern "C" __attribute__((used, no_sanitize_coverage)) inline void __sanitizer_cov_trace_pc() { ++emulator_thread->steps; }
#endif

// Programmatic dependent launch.  A block lets the next launch begin when one of its threads says so, or when it ends.
inline void let_next_launch(Block& block) {
    if (block.lets_next) return;
    block.lets_next = true;
    ++block.launch->letting;
}
inline void let_next_launch() {
    let_next_launch(*emulator_thread->of_block);
    emulator_yield();
}
inline void await_earlier_launch() {
    const Launched* before = emulator_thread->of_block->launch->before;
    if (before != nullptr) emulator_wait(&before->ended, before->threads);
}

// By all lanes of a warp: what each of them brings.
inline const std::uint64_t* exchange(std::uint64_t mine) {
    Thread& thread = *emulator_thread;
    const unsigned nth = thread.operations++;
    Warp& warp = *thread.warp;
    warp.value[nth % 2][thread.thread.x % 32] = mine;
    ++warp.arrived[nth % 2];
    emulator_wait(&warp.arrived[nth % 2], 32 * (nth / 2 + 1));
    return warp.value[nth % 2];
}
// By the eight lanes of a line of memory, each with its 16 bytes there: the line is seen whole, or not at all.
inline void exchange_line(const unsigned char* here, ulonglong2& words, bool stores) {
    Thread& thread = *emulator_thread;
    const unsigned lane = thread.thread.x % 32, nth = thread.lines++, turn = nth % 2, all = 8 * (nth / 2 + 1);
    PacketLine& line = thread.warp->lines[lane / 8];
    unsigned char *const mine = line.bytes[turn] + lane % 8 * 16, *const memory = const_cast<unsigned char*>(here) - lane % 8 * 16;
    if (stores) std::memcpy(mine, &words, 16);
    if (++line.arrived[turn] == all) {
        std::memcpy(stores ? memory : line.bytes[turn], stores ? line.bytes[turn] : memory, 128);
        if (stores) emulator_count_line(thread.of_block->launch->rank);
    } else {
        emulator_wait(&line.arrived[turn], all);
    }
    if (!stores) std::memcpy(&words, mine, 16);
}
template <class T>
std::uint64_t bits_of(T value) {
    static_assert(sizeof(T) <= 8);
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T>
T from_bits(std::uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
// By threads of a block; whether `here` holds for any of them.  Who does not wait is told nothing.
inline bool meet(int barrier, unsigned threads, bool here, bool waits = true) {
    Block& block = *emulator_thread->of_block;
    Barrier& b = block.barriers[barrier];
    const unsigned was = b.generation;
    b.any |= here;
    if (++b.arrived >= threads - (barrier == 0 ? block.ended : 0)) {
        b.result = b.any;
        b.any = b.arrived = 0;
        ++b.generation;
        return b.result;
    }
    if (!waits) return false;
    emulator_wait_change(&b.generation, was);
    return b.result;
}

}  // namespace emulator

#define threadIdx (emulator::emulator_thread->thread)
#define blockIdx (emulator::emulator_thread->block)
#define gridDim (emulator::emulator_thread->grid)
#define blockDim (Index{emulator::emulator_thread->of_block->threads})
#define __device__
#define __host__
#define __noinline__ __attribute__((noinline))

inline void __syncwarp(unsigned = ~0u) { emulator::exchange(0); }
inline void __syncthreads() { emulator::meet(0, emulator::emulator_thread->of_block->threads, false); }
inline int __syncthreads_or(int here) { return emulator::meet(0, emulator::emulator_thread->of_block->threads, here != 0); }
inline int __syncthreads_and(int here) { return !__syncthreads_or(here == 0); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulator::from_bits<T>(emulator::exchange(emulator::bits_of(value))[lane & 31]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
    const int lane = threadIdx.x % 32;
    const auto* values = emulator::exchange(emulator::bits_of(value));
    return lane < distance ? value : emulator::from_bits<T>(values[lane - distance]);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    const int lane = threadIdx.x % 32;
    return emulator::from_bits<T>(emulator::exchange(emulator::bits_of(value))[lane ^ mask]);
}
template <class T>
unsigned __match_any_sync(unsigned, T value) {
    const auto mine = emulator::bits_of(value);
    const auto* values = emulator::exchange(mine);
    unsigned lanes = 0;
    for (int lane = 0; lane < 32; ++lane) lanes |= static_cast<unsigned>(values[lane] == mine) << lane;
    return lanes;
}
inline unsigned __ballot_sync(unsigned, bool here) {
    const auto* values = emulator::exchange(here);
    unsigned lanes = 0;
    for (int lane = 0; lane < 32; ++lane) lanes |= static_cast<unsigned>(values[lane] != 0) << lane;
    return lanes;
}
inline bool __all_sync(unsigned mask, bool here) { return __ballot_sync(mask, here) == ~0u; }
inline bool __any_sync(unsigned mask, bool here) { return __ballot_sync(mask, here) != 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const auto* values = emulator::exchange(value);
    std::uint64_t most = 0;
    for (int lane = 0; lane < 32; ++lane) most = values[lane] > most ? values[lane] : most;
    return static_cast<unsigned>(most);
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    const auto* values = emulator::exchange(value);
    unsigned sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += static_cast<unsigned>(values[lane]);
    return sum;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline float __uint_as_float(unsigned bits) { return emulator::from_bits<float>(bits); }
inline float __int_as_float(int bits) { return emulator::from_bits<float>(static_cast<unsigned>(bits)); }
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(emulator::bits_of(value)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return high << by | low >> (32 - by); }
// Fibers run one at a time.
template <class T, class Change>
T replace_by(T* at, Change change) {
    const T before = *at;
    *at = change(before);
    return before;
}
template <class T, class U>
T atomicAdd(T* at, U value) {
    return replace_by(at, [=](T now) { return static_cast<T>(now + value); });
}
template <class T, class U>
T atomicMax(T* at, U value) {
    return replace_by(at, [=](T now) { return static_cast<T>(value) > now ? static_cast<T>(value) : now; });
}
template <class T, class U>
T atomicMin(T* at, U value) {
    return replace_by(at, [=](T now) { return static_cast<T>(value) < now ? static_cast<T>(value) : now; });
}
template <class T, class U>
T atomicOr(T* at, U value) {
    return replace_by(at, [=](T now) { return static_cast<T>(now | value); });
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    return a < b ? a : b;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    return a > b ? a : b;
}
