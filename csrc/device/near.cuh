// The ranks of our domain, which loads and stores reach, and those of others, which are put to (csrc/protocol/domains.h).
#pragma once
#include "../protocol/domains.h"
#include "config.cuh"

namespace moecomm {

// With one domain all of this is known when a kernel is compiled.
template <i32 ranks, i32 near>
struct Domains {
    static constexpr i32 kCount = ranks / near;
    static_assert(kCount == 1 || near <= kWarp, "a lane a rank of our domain");
    i32 me;

    MOECOMM_FN bool reaches(i32 rank) const { return kCount == 1 || rank / near == own(); }
    MOECOMM_FN i32 own() const { return kCount == 1 ? 0 : me / near; }
    MOECOMM_FN i32 first() const { return own() * near; }
    // The n-th of the other domains, the one after ours first.
    MOECOMM_FN i32 other(i32 n) const { return (own() + 1 + n) % kCount; }
    // The rank with our index in a domain: it relays for us there, and we for it here.
    MOECOMM_FN i32 counterpart(i32 domain) const { return domain * near + me % near; }
    // Who deals with `rank` in our domain: itself, or its relay.
    MOECOMM_FN i32 local(i32 rank) const { return kCount == 1 ? rank : first() + rank % near; }
    // As `rotated`, in our domain.
    MOECOMM_FN i32 neighbour(i32 turn) const { return kCount == 1 ? (me + 1 + turn) % ranks : first() + (me + 1 + turn) % near; }
};

}  // namespace moecomm
