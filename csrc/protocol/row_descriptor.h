// Row descriptor: travels in place of a token's row if the owner fetches the row later (fused layers).
#pragma once
#include "compiler.h"

namespace moecomm {

// Offsets of the row and of the place for its result in the source rank's window, and the source rank; `same` is an earlier row of
// the same token at this owner, if there is one. 16 bytes, so that one store writes it.
struct alignas(16) RowDescriptor {
    static constexpr i32 kSourceRankShift = 48, kSameShift = 36, kUnit = 16;  // rows begin at multiples of 16 bytes, below 1 TiB

    u64 row_and_same, result_and_source_rank;

    // `same`: -1 for none.
    MOECOMM_BOTH static RowDescriptor of(u64 row, i32 same, u64 result, i32 source_rank) {
        const u64 first = same < (1 << (64 - kSameShift)) - 1 ? static_cast<u64>(same + 1) : 0;
        return {row / kUnit | first << kSameShift, result | static_cast<u64>(source_rank) << kSourceRankShift};
    }
    MOECOMM_BOTH u64 row() const { return (row_and_same & ((1ull << kSameShift) - 1)) * kUnit; }
    MOECOMM_BOTH i32 same() const { return static_cast<i32>(row_and_same >> kSameShift) - 1; }
    MOECOMM_BOTH i32 source_rank() const { return static_cast<i32>(result_and_source_rank >> kSourceRankShift); }
    MOECOMM_BOTH u64 result() const { return result_and_source_rank & ((1ull << kSourceRankShift) - 1); }
};

}  // namespace moecomm
