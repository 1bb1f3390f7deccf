// Copy bytes, which may come from a peer, and hash what was loaded.
#pragma once
#include "../combine/row_hash.cuh"
#include "../elementwise/row_pass.cuh"
#include "call_args.h"

namespace moecomm {

constexpr i32 kVectorsInFlight = 4;  // that a thread loads before it stores them

// Called by all threads of the grid. The hash is that of moecomm/dispatch/row_hash.py, of one row.
MOECOMM_FN void copy_hashed(const CopyHashedArgs& a) {
    const i64 vectors = a.bytes / 16, threads = static_cast<i64>(gridDim.x) * kPassThreads;
    const uint4* const from = reinterpret_cast<const uint4*>(a.from);
    uint4* const to = reinterpret_cast<uint4*>(a.to);
    u64 found = 0;
    i64 i = static_cast<i64>(blockIdx.x) * kPassThreads + threadIdx.x;
    for (; i + (kVectorsInFlight - 1) * threads < vectors; i += kVectorsInFlight * threads) {
        uint4 held[kVectorsInFlight];
#pragma unroll
        for (i32 j = 0; j < kVectorsInFlight; ++j) held[j] = from[i + j * threads];
#pragma unroll
        for (i32 j = 0; j < kVectorsInFlight; ++j) {
            if (to != nullptr) to[i + j * threads] = held[j];
            found += hash_vector(held[j], static_cast<i32>(4 * (i + j * threads)));
        }
    }
    for (; i < vectors; i += threads) {
        const uint4 held = from[i];
        if (to != nullptr) to[i] = held;
        found += hash_vector(held, static_cast<i32>(4 * i));
    }
    if (i == vectors) {  // one thread: the bytes behind the last vector, up to 15
        u32 words[4] = {0, 0, 0, 0};
        for (i64 at = 16 * vectors; at < a.bytes; ++at) {
            const u8 byte = reinterpret_cast<const u8*>(a.from)[at];
            if (a.to != 0) reinterpret_cast<u8*>(a.to)[at] = byte;
            words[at % 16 / 4] |= static_cast<u32>(byte) << 8 * (at % 4);
        }
        found += hash_vector(make_uint4(words[0], words[1], words[2], words[3]), static_cast<i32>(4 * i));
    }
    add_hash_of_lanes(reinterpret_cast<u64*>(a.hash), found);
}

}  // namespace moecomm
