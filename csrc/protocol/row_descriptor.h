// What travels, in a dispatch of a layer whose rows are fetched later, in the place of a token's row.
#pragma once
#include "compiler.h"

namespace moecomm {

// Where the row lies and where what the expert makes of it goes, offsets in the window of the token's home, and the home; and the first row
// at the owner that is of the same token, where that is an earlier one.  16 bytes, one store.
struct alignas(16) RowDescriptor {
    static constexpr i32 kSourceRankShift = 48, kSameShift = 36, kUnit = 16;  // rows begin at multiples of 16 bytes, before 1 TiB

    u64 row_and_same, receive_and_source_rank;

    // `same`: -1: none.
    MOECOMM_BOTH static RowDescriptor of(u64 row, i32 same, u64 receive_buffer, i32 source_rank) {
        const u64 first = same < (1 << (64 - kSameShift)) - 1 ? static_cast<u64>(same + 1) : 0;
        return {row / kUnit | first << kSameShift, receive_buffer | static_cast<u64>(source_rank) << kSourceRankShift};
    }
    MOECOMM_BOTH u64 row() const { return (row_and_same & ((1ull << kSameShift) - 1)) * kUnit; }
    MOECOMM_BOTH i32 same() const { return static_cast<i32>(row_and_same >> kSameShift) - 1; }
    MOECOMM_BOTH i32 source_rank() const { return static_cast<i32>(receive_and_source_rank >> kSourceRankShift); }
    MOECOMM_BOTH u64 receive_buffer() const { return receive_and_source_rank & ((1ull << kSourceRankShift) - 1); }
};

}  // namespace moecomm
