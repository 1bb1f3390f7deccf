// This rank's domain, which loads and stores reach, and the other domains, which puts reach (csrc/protocol/domains.h).
#pragma once
#include "../device/config.cuh"
#include "../protocol/domains.h"

namespace moecomm {

// Domain arithmetic. Any thread calls it. With one domain, all of it is known at compile time.
template <i32 ranks, i32 scaleup_ranks>
struct Domains {
    static constexpr i32 kCount = ranks / scaleup_ranks;
    static_assert(kCount == 1 || scaleup_ranks <= kWarp, "a lane a rank of our domain");
    i32 me;

    MOECOMM_FN bool reaches(i32 rank) const { return kCount == 1 || rank / scaleup_ranks == own(); }
    MOECOMM_FN i32 own() const { return kCount == 1 ? 0 : me / scaleup_ranks; }
    MOECOMM_FN i32 first() const { return own() * scaleup_ranks; }
    // The n-th other domain, beginning with the one after this rank's.
    MOECOMM_FN i32 other(i32 n) const { return (own() + 1 + n) % kCount; }
    MOECOMM_FN i32 nth(i32 domain) const { return (domain - own() - 1 + kCount) % kCount; }  // other(nth(domain)) == domain
    // The rank with this rank's index in `domain`: it forwards for this rank there, and this rank forwards for it here, unless masked.
    MOECOMM_FN i32 counterpart(i32 domain) const { return domain * scaleup_ranks + me % scaleup_ranks; }
    // The rank of this domain with the index of `rank`: `rank` itself, or its forwarder unless masked.
    MOECOMM_FN i32 local(i32 rank) const { return kCount == 1 ? rank : first() + rank % scaleup_ranks; }
    // `rotated` within this domain.
    MOECOMM_FN i32 neighbor(i32 step) const { return kCount == 1 ? (me + 1 + step) % ranks : first() + (me + 1 + step) % scaleup_ranks; }
};

}  // namespace moecomm
