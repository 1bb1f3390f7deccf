// What travels, in a dispatch of a layer whose rows are fetched later, in the place of a token's row.
#pragma once
#include "compiler.h"

namespace moecomm {

// Offsets in the window of the token's home: where the row lies, and where what the expert makes of it goes; above the latter, the home.
// 16 bytes, one store.
struct alignas(16) Slip {
    static constexpr i32 kHomeShift = 48;

    u64 row, landing_and_home;

    MOECOMM_BOTH i32 home() const { return static_cast<i32>(landing_and_home >> kHomeShift); }
    MOECOMM_BOTH u64 landing() const { return landing_and_home & ((1ull << kHomeShift) - 1); }
};

}  // namespace moecomm
