// The experts of each rank: consecutive ones, in order of ranks. The first `experts % ranks` ranks have one more than the others.
#pragma once
#include "compiler.h"

namespace moecomm {

struct ExpertRanges {
    i32 experts, ranks;  // experts >= ranks

    MOECOMM_BOTH constexpr i32 least() const { return experts / ranks; }
    MOECOMM_BOTH constexpr i32 longer() const { return experts % ranks; }  // ranks with one more
    MOECOMM_BOTH constexpr i32 most() const { return least() + (longer() > 0 ? 1 : 0); }
    MOECOMM_BOTH constexpr i32 first(i32 rank) const { return rank * least() + (rank < longer() ? rank : longer()); }
    MOECOMM_BOTH constexpr i32 count(i32 rank) const { return least() + (rank < longer() ? 1 : 0); }
    MOECOMM_BOTH constexpr i32 owner(i32 expert) const {
        const i32 begin = longer() * most();  // first expert of a rank that has not one more
        return expert < begin ? expert / most() : longer() + (expert - begin) / least();
    }
    MOECOMM_BOTH constexpr i32 local(i32 expert) const { return longer() == 0 ? expert % least() : expert - first(owner(expert)); }
};

}  // namespace moecomm
