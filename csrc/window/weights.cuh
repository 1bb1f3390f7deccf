// Weights of experts on their way from a trainer to an engine (moecomm/transfer/gpu.py). One launch takes many matrices, which are in its
// arguments. Each kernel is called by all threads of any number of blocks, waits for no rank, and cannot fail.
//
// Hashes are those of moecomm/dispatch/row_hash.py, of one row: sums of words, so threads add their parts in any order. The one that
// stores a word hashes it.
#pragma once
#include "../combine/row_hash.cuh"
#include "../elementwise/quantize_rows.cuh"
#include "../protocol/order.h"
#include "call_args.h"

namespace moecomm {

constexpr i32 kVectorsInFlight = 4;  // that a thread loads before it stores them

// Called by all lanes of a warp together. Most warps have no part of a small tensor.
MOECOMM_FN void add_hash(u64 hash, u64 found) {
    if (hash != 0 && __any_sync(kAllLanes, found != 0)) add_hash_of_lanes(reinterpret_cast<u64*>(hash), found);
}

// Part of a hash that one byte adds: of a word, which has a sign, or of the zeros behind the last byte nothing.
MOECOMM_FN u64 hash_byte(i64 at, u32 byte) { return hash_word(byte << 8 * static_cast<i32>(at % 4), static_cast<i32>(at / 4)); }

// Copy bytes and hash what was loaded. `Hashed` false: copy alone.
template <bool hashed>
MOECOMM_FN u64 copy_vectors(const CopyJob& job, i64& i) {
    const i64 vectors = job.bytes / 16, threads = static_cast<i64>(gridDim.x) * kPassThreads;
    const uint4* const from = reinterpret_cast<const uint4*>(job.from);
    uint4* const to = reinterpret_cast<uint4*>(job.to);
    u64 found = 0;
    for (; i + (kVectorsInFlight - 1) * threads < vectors; i += kVectorsInFlight * threads) {
        uint4 held[kVectorsInFlight];
#pragma unroll
        for (i32 j = 0; j < kVectorsInFlight; ++j) held[j] = from[i + j * threads];
#pragma unroll
        for (i32 j = 0; j < kVectorsInFlight; ++j) {
            if (to != nullptr) to[i + j * threads] = held[j];
            if constexpr (hashed) found += hash_vector(held[j], static_cast<i32>(4 * (i + j * threads)));
        }
    }
    for (; i < vectors; i += threads) {
        const uint4 held = from[i];
        if (to != nullptr) to[i] = held;
        if constexpr (hashed) found += hash_vector(held, static_cast<i32>(4 * i));
    }
    if (i == vectors) {  // one thread: the bytes behind the last vector, up to 15
        for (i64 at = 16 * vectors; at < job.bytes; ++at) {
            const u8 byte = reinterpret_cast<const u8*>(job.from)[at];
            if (job.to != 0) reinterpret_cast<u8*>(job.to)[at] = byte;
            if constexpr (hashed) found += hash_byte(at, byte);
        }
    }
    i -= vectors;
    return found;
}

// Copy bytes, which may come from a peer or go to one. The host has read the word that says that they are there; the fence orders the reads
// here behind what their sender has written.
MOECOMM_FN void copy_weights(const CopyWeightsArgs& a) {
    fence_system();
    i64 i = static_cast<i64>(blockIdx.x) * kPassThreads + threadIdx.x;  // of the next tensor
    for (i32 nth = 0; nth < a.count; ++nth) {
        const CopyJob& job = a.jobs[nth];
        if (job.hash == 0)
            copy_vectors<false>(job, i);
        else
            add_hash(job.hash, copy_vectors<true>(job, i));
    }
}

// The hash of what a thread of cast_weights stores of one matrix. A scale of one byte may share its word with those of other lanes.
struct HashOfCast {
    u64 of_values = 0, of_scales = 0;

    template <i32 words>
    MOECOMM_FN void values(i64 at, const u32 (&stored)[words]) {
#pragma unroll
        for (i32 i = 0; i < words; ++i) of_values += hash_word(stored[i], static_cast<i32>(at / 4) + i);
    }
    MOECOMM_FN void value(i64 at, u32 byte) { of_values += hash_byte(at, byte); }
    MOECOMM_FN void scale(i64 nth, u32 bits) { of_scales += hash_word(bits, static_cast<i32>(nth)); }
    MOECOMM_FN void scale(i64 nth, u8 byte) { of_scales += hash_byte(nth, byte); }
};

// The factor of NVFP4 values before they are scaled, 2688 / amax, as moecomm/transfer/casts.py has it.
MOECOMM_FN float nvfp4_factor(u32 amax_bits) {
    const float amax = __uint_as_float(amax_bits);
    const float least = amax < 1e-30f ? 1e-30f : amax;  // a NaN stays one
    constexpr float most = 0x1.fffffep127f;
    return __fdiv_rn(2688.0f, least > most ? most : least);
}

// Add the largest magnitudes of matrices, as bits, to words that hold 0 or such bits; a NaN is the largest.
template <Type type, bool aligned>
MOECOMM_FN void find_largest(const CastWeightsArgs& a) {
    i64 at = first_of_warp();
    for (i32 nth = 0; nth < a.count; ++nth) {
        const QuantizeArgs& matrix = a.jobs[nth].matrix;
        const i32 segments = ceil_div(matrix.hidden, kWarp * kPieceColumns), all = matrix.count * segments;
        u32 seen = 0;
        for (; at < all; at += all_warps()) {
            const i32 segment = static_cast<i32>(at), column = (segment % segments * kWarp + lane_id()) * kPieceColumns;
            const u8* const row =
                reinterpret_cast<const u8*>(matrix.x) + static_cast<i64>(segment / segments) * matrix.hidden * bytes_of(type);
            seen = larger<type>(seen, largest_magnitudes(load_piece<type, aligned>(row, column, matrix.hidden)));
        }
        at -= all;
        const u32 of_warp = __float_as_uint(largest_in_group<type, kWarp>(seen));
        if (lane_id() == 0 && of_warp != 0) atomicMax(reinterpret_cast<unsigned*>(matrix.global_scale), of_warp);
    }
}

// Cast matrices, straight to memory that may be a peer's, and hash what is stored. NVFP4 needs find_largest before.
template <Type type, Format format, bool aligned>
MOECOMM_FN void cast_weights(const CastWeightsArgs& a) {
    constexpr bool by_blocks = format == Format::fp8 || is_scaled_by_row(format);
    Walk walk{static_cast<i64>(by_blocks ? blockIdx.x : first_of_warp()), 0};
    for (i32 nth = 0; nth < a.count; ++nth) {
        const CastJob& job = a.jobs[nth];
        HashOfCast told;
        if constexpr (format == Format::fp8) {
            static_assert(aligned);
            quantize_blocks<type>(job.matrix, walk, told);
        } else if constexpr (is_scaled_by_row(format)) {
            quantize_whole_rows<type, format, aligned>(job.matrix, walk, told);
        } else if constexpr (format == Format::nvfp4) {
            const float factor = nvfp4_factor(*reinterpret_cast<const u32*>(job.matrix.global_scale));
            quantize_groups<type, format, aligned>(job.matrix, GlobalScale(factor), walk, told);
            if (blockIdx.x == 0 && threadIdx.x == 0) {
                const u32 bits = __float_as_uint(__fdiv_rn(1.0f, factor));
                *reinterpret_cast<u32*>(job.factor) = bits;
                atomicAdd(reinterpret_cast<unsigned long long*>(job.hash) + 2, static_cast<unsigned long long>(hash_word(bits, 0)));
            }
        } else {
            quantize_groups<type, format, aligned>(job.matrix, GlobalScale(), walk, told);
        }
        add_hash(job.hash, told.of_values);
        add_hash(job.hash + sizeof(u64), told.of_scales);
    }
}

// Tell readers that what earlier kernels of the stream have stored is there. Called by the threads of one block, each for other readers.
MOECOMM_FN void tell_readers(const TellArgs& a) {
    fence_system();
    for (i32 i = threadIdx.x; i < a.count; i += kPassThreads) store_release(reinterpret_cast<u64*>(a.words[i]), a.value);
}

}  // namespace moecomm
