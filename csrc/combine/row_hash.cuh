// Hashes of rows in verified rounds: sums of words of 4 bytes, each times an odd number that depends on its place, modulo 2^64. The hash is
// that of moecomm/dispatch/row_hash.py. Lanes add parts of it in any order.
#pragma once
#include "../device/lanes.cuh"

namespace moecomm {

// The place-th number of the generator splitmix64, made odd.
MOECOMM_FN u64 hash_factor(i32 place) {
    u64 at = (static_cast<u64>(place) + 1) * 0x9e3779b97f4a7c15ull;
    at = (at ^ at >> 30) * 0xbf58476d1ce4e5b9ull;
    at = (at ^ at >> 27) * 0x94d049bb133111ebull;
    return (at ^ at >> 31) | 1;
}
MOECOMM_FN u64 hash_word(u32 word, i32 place) { return static_cast<u64>(static_cast<i64>(static_cast<i32>(word))) * hash_factor(place); }
MOECOMM_FN u64 hash_vector(const uint4& words, i32 place) {
    return hash_word(words.x, place) + hash_word(words.y, place + 1) + hash_word(words.z, place + 2) + hash_word(words.w, place + 3);
}
// The weight of a row that travels as it is lies behind it, and is loaded with each of its pieces.
template <class Role>
MOECOMM_FN u64 hash_weight(float weight) {
    return hash_word(__float_as_uint(weight), Role::cfg.row_bytes() / 4);
}

// Hash of columns that this thread has stored in a row, of `bytes`, a multiple of 8, from the `at`-th byte on.
MOECOMM_FN u64 hash_stored(const u8* row, i32 at, i32 bytes) {
    u64 found = 0;
    for (i32 end = at + bytes; at < end; at += 8) {
        const uint2 words = *reinterpret_cast<const uint2*>(row + at);
        found += hash_word(words.x, at / 4) + hash_word(words.y, at / 4 + 1);
    }
    return found;
}

// Called by all lanes of a warp together. Adds what they have found to a hash; relaxed.
MOECOMM_FN void add_hash_of_lanes(u64* hash, u64 found) {
    found = sum_of_warp(found);
    if (lane_id() == 0) atomicAdd(reinterpret_cast<unsigned long long*>(hash), static_cast<unsigned long long>(found));
}

}  // namespace moecomm
