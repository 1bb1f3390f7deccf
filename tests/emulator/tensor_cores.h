// The part of Hopper that the grouped GEMM uses, for g++: tensor copies with swizzle, barriers that count bytes, products of a warpgroup,
// matrices turned by a warp.  Addresses in shared memory are offsets in the block's.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <map>
#include <vector>

#include "cuda.h"

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned out = 0;
    for (int i = 0; i < 32; i += 8) {
        const unsigned at = selector >> i / 2 & 7;
        out |= ((at < 4 ? a : b) >> at % 4 * 8 & 0xffu) << i;
    }
    return out;
}

namespace emulator {

inline Block* of_cluster(int cluster, int rank) { return emulator_thread->of_block + rank - static_cast<int>(blockIdx.x) % cluster; }
inline unsigned char* shared_at(unsigned address) { return emulator_thread->of_block->shared + address; }
inline unsigned offset_of(const void* p) { return static_cast<unsigned>(static_cast<const unsigned char*>(p) - shared_at(0)); }

inline void sync_cluster(int cluster) {
    emulator::Barrier& b = of_cluster(cluster, 0)->barriers[15];
    const unsigned was = b.generation;
    if (++b.arrived == cluster * emulator_thread->of_block->threads) {
        b.arrived = 0;
        ++b.generation;
    } else {
        emulator_wait_change(&b.generation, was);
    }
}

// An mbarrier: bit 0 its phase, then the arrivals of a phase, those that are missing, and bytes that are.
inline void init_barrier(unsigned long long* barrier, std::uint64_t arrivals) {
    *barrier = arrivals << 8 | arrivals << 24;
    emulator_thread->of_block->mbarriers[offset_of(barrier) / 8] = 1;
}
// Copies bring nothing to where a barrier has been: a GPU may lose it.
inline void require_no_barriers(const Block& block, unsigned first, unsigned bytes) {
    for (unsigned at = first / 8; at < (first + bytes) / 8; ++at)
        if (block.mbarriers[at] != 0) __builtin_trap();
}
inline void bring(unsigned long long& barrier, int arrivals, long long bytes) {
    barrier -= static_cast<std::uint64_t>(arrivals) << 24;
    barrier -= static_cast<std::uint64_t>(bytes) << 40;
    if (barrier >> 24 == 0) barrier = (barrier ^ 1) | (barrier >> 8 & 0xffff) << 24;
}

// Where the copies of a tensor put what would be at this place, 16 bytes at a time.
inline unsigned swizzled(unsigned place) { return place ^ (place >> 7 & 7) << 4; }
inline unsigned swizzled_64(unsigned place) { return place ^ (place >> 7 & 3) << 4; }  // rows of 64 bytes

// A TensorMap as gemm_machine.py makes it; bit 16 of the last word: no swizzle.
struct Map {
    std::uint64_t address, dims[5], strides[4], box[5], rank_and_size;
};

// The box at these elements, to the same place in blocks first .. first + count - 1 of the cluster; bytes count at their barriers.
inline void load_box(unsigned to, const void* map, const int (&at)[5], const void* barrier, int cluster, int first, int count) {
    const Map& m = *static_cast<const Map*>(map);
    const int rank = m.rank_and_size & 0xff, size = m.rank_and_size >> 8 & 0xff;
    const unsigned row_bytes = m.box[0] * size;
    unsigned rows = 1;
    for (int d = 1; d < rank; ++d) rows *= m.box[d];
    const bool plain = (m.rank_and_size >> 16 & 1) != 0;
    if (to % (plain ? 128 : 1024) != 0 || (!plain && row_bytes != 128 && row_bytes != 64)) __builtin_trap();
    for (int block = first; block < first + count; ++block) {
        unsigned char* const shared = of_cluster(cluster, block)->shared;
        require_no_barriers(*of_cluster(cluster, block), to, rows * row_bytes);
        for (unsigned row = 0; row < rows; ++row) {
            unsigned left = row;
            std::uint64_t from = m.address;
            bool inside = true;
            for (int d = 1; d < rank; ++d) {
                const std::uint64_t index = at[d] + left % m.box[d];
                left /= m.box[d];
                inside &= index < m.dims[d];
                from += index * m.strides[d - 1];
            }
            const std::int64_t columns = inside ? static_cast<std::int64_t>(m.dims[0]) - at[0] : 0;
            for (unsigned byte = 0; byte < row_bytes; byte += 16) {
                const unsigned at_byte = to + row * row_bytes + byte;
                unsigned char* const place = shared + (plain ? at_byte : row_bytes == 64 ? swizzled_64(at_byte) : swizzled(at_byte));
                const std::size_t there = std::clamp<std::int64_t>(columns * size - byte, 0, 16);
                std::memcpy(place, reinterpret_cast<unsigned char*>(from) + at[0] * size + byte, there);
                std::memset(place + there, 0, 16 - there);
            }
        }
        bring(*reinterpret_cast<unsigned long long*>(shared + offset_of(barrier)), 0, rows * row_bytes);
    }
}

// The first-level cache of a block at its worst: a line is, until the block ends, what it was when something was first loaded from it.
using Line = std::array<unsigned char, 128>;
inline std::map<const Block*, std::map<std::uint64_t, Line>> lines;
inline void forget_lines() { lines[emulator_thread->of_block].clear(); }
inline const void* in_first_level(const void* from) {
    const auto at = reinterpret_cast<std::uint64_t>(from);
    const auto [line, is_new] = lines[emulator_thread->of_block].try_emplace(at / sizeof(Line));
    if (is_new) std::memcpy(&line->second, reinterpret_cast<const void*>(at / sizeof(Line) * sizeof(Line)), sizeof(Line));
    return line->second.data() + at % sizeof(Line);
}

// Bulk stores of each thread that have not been written yet, nor read.
struct Stored {
    void* to;
    const void* from;
    int bytes;
};
inline std::map<const Thread*, std::deque<Stored>> under_way;
inline void store_later(void* to, const void* from, int bytes) {
    if (bytes % 16 != 0 || (reinterpret_cast<std::uint64_t>(to) | reinterpret_cast<std::uint64_t>(from)) % 16 != 0) __builtin_trap();
    under_way[emulator_thread].push_back({to, from, bytes});
}
inline void finish_stores(std::size_t but) {
    auto& mine = under_way[emulator_thread];
    for (; mine.size() > but; mine.pop_front()) std::memcpy(mine.front().to, mine.front().from, mine.front().bytes);
}

inline float widen_e4m3(unsigned char v) {
    if ((v & 0x7f) == 0x7f) return NAN;
    const float magnitude = __uint_as_float((v & 0x7fu) << 20) * 0x1p120f;  // bits of a float whose exponent is 120 too low
    return v & 0x80 ? -magnitude : magnitude;
}
inline float widen_bf16(const unsigned char* p) {
    return __uint_as_float(static_cast<unsigned>(p[0]) << 16 | static_cast<unsigned>(p[1]) << 24);
}
inline float widen_fp16(const unsigned char* p) {
    _Float16 value;
    std::memcpy(&value, p, 2);
    return static_cast<float>(value);
}
// 32 bytes of a row of an operand times those of another.  `type`: a Type of csrc.
template <int type>
float dot(std::uint64_t a, unsigned a_row, std::uint64_t b, unsigned b_row) {
    constexpr bool fp16 = type == 1, e4m3 = type == 3;
    const auto at = [](std::uint64_t operand, unsigned row, unsigned byte) {
        return shared_at(swizzled(((operand & 0x3fff) << 4) + row * 128 + byte));
    };
    const auto widen = [](const unsigned char* p) { return e4m3 ? widen_e4m3(*p) : fp16 ? widen_fp16(p) : widen_bf16(p); };
    float sum = 0;
    for (unsigned half = 0; half < 32; half += 16) {
        const unsigned char *const x = at(a, a_row, half), *const y = at(b, b_row, half);
        for (unsigned byte = 0; byte < 16; byte += e4m3 ? 1 : 2) sum += widen(x + byte) * widen(y + byte);
    }
    return sum;
}
template <int type, int n, int size>
void multiply(float (&sums)[size], std::uint64_t a, std::uint64_t b, bool keep) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    for (unsigned i = 0; i < n / 2; ++i) {
        const unsigned row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        sums[i] = (keep ? sums[i] : 0.0f) + dot<type>(a, row, b, column);
    }
}

// Products of bf16 whose operand A is in registers.
template <int n, int size>
void multiply_registers(float (&sums)[size], const unsigned* a, std::uint64_t b, bool keep) {
    float of_a[2][16];  // of the lane's two rows
    const unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; ++i) {
        const auto* values = exchange(a[i]);
        for (unsigned k = 0; k < 8; ++k) {
            const unsigned word = static_cast<unsigned>(values[lane / 4 * 4 + k / 2]);
            of_a[i % 2][i / 2 * 8 + k] = __uint_as_float(word >> k % 2 * 16 << 16);
        }
    }
    for (unsigned i = 0; i < n / 2; ++i) {
        const unsigned column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = 0;
        for (unsigned k = 0; k < 16; ++k)
            sum += of_a[i / 2 % 2][k] * widen_bf16(shared_at(swizzled(((b & 0x3fff) << 4) + column * 128 + k * 2)));
        sums[i] = (keep ? sums[i] : 0.0f) + sum;
    }
}

template <int n, int size>
void multiply_integers(int (&sums)[size], std::uint64_t a, std::uint64_t b, bool keep) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const auto at = [](std::uint64_t operand, unsigned row, unsigned byte) {
        return static_cast<int>(static_cast<signed char>(*shared_at(swizzled(((operand & 0x3fff) << 4) + row * 128 + byte))));
    };
    for (unsigned i = 0; i < n / 2; ++i) {
        const unsigned row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (!keep) sums[i] = 0;
        for (unsigned byte = 0; byte < 32; ++byte) sums[i] += at(a, row, byte) * at(b, column, byte);
    }
}

// As gemv_all_reduce.cuh describes it.  `type`: a Type of csrc.
template <int type>
void multiply_small(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    unsigned of_a[4][32], of_b[2][32];
    for (int i = 0; i < 4; ++i) {
        const auto* values = exchange(a[i]);
        for (int lane = 0; lane < 32; ++lane) of_a[i][lane] = static_cast<unsigned>(values[lane]);
    }
    for (int i = 0; i < 2; ++i) {
        const auto* values = exchange(b[i]);
        for (int lane = 0; lane < 32; ++lane) of_b[i][lane] = static_cast<unsigned>(values[lane]);
    }
    const auto half = [](unsigned word, int high) {
        const unsigned char bytes[2] = {static_cast<unsigned char>(word >> 16 * high), static_cast<unsigned char>(word >> (16 * high + 8))};
        return type == 1 ? widen_fp16(bytes) : widen_bf16(bytes);
    };
    const unsigned lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
            d[i] += half(of_a[k / 8 * 2 + i / 2][row * 4 + k % 8 / 2], k % 2) * half(of_b[k / 8][column * 4 + k % 8 / 2], k % 2);
    }
}

inline void store_matrices(unsigned address, const unsigned (&m)[4]) {
    const unsigned lane = threadIdx.x % 32;
    unsigned row[4];
    for (unsigned i = 0; i < 4; ++i) {
        const auto* values = exchange(m[i]);
        for (unsigned pair = 0; pair < 4 && i == lane / 8; ++pair) row[pair] = static_cast<unsigned>(values[lane % 8 * 4 + pair]);
    }
    std::memcpy(shared_at(address), row, sizeof row);
}
inline void store_turned(unsigned address, const unsigned (&m)[4]) {
    const unsigned lane = threadIdx.x % 32;
    unsigned short row[8];
    for (unsigned i = 0; i < 4; ++i) {
        const auto* values = exchange(m[i]);
        if (i != lane / 8) continue;
        for (unsigned column = 0; column < 8; ++column) row[column] = values[column * 4 + lane % 8 / 2] >> lane % 2 * 16;
    }
    std::memcpy(shared_at(address), row, sizeof row);
}

}  // namespace emulator
