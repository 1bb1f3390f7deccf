// The ranks of our domain, which loads and stores reach, and those of others, which are put to (csrc/protocol/domains.h).
#pragma once
#include "../device/config.cuh"
#include "../protocol/domains.h"

namespace moecomm {

// With one domain all of this is known when a kernel is compiled.
template <i32 ranks, i32 scaleup_ranks>
struct Domains {
    static constexpr i32 kCount = ranks / scaleup_ranks;
    static_assert(kCount == 1 || scaleup_ranks <= kWarp, "a lane a rank of our domain");
    i32 me;

    MOECOMM_FN bool reaches(i32 rank) const { return kCount == 1 || rank / scaleup_ranks == own(); }
    MOECOMM_FN i32 own() const { return kCount == 1 ? 0 : me / scaleup_ranks; }
    MOECOMM_FN i32 first() const { return own() * scaleup_ranks; }
    // The n-th of the other domains, the one after ours first.
    MOECOMM_FN i32 other(i32 n) const { return (own() + 1 + n) % kCount; }
    // The rank with our index in a domain: it relays for us there, and we for it here.
    MOECOMM_FN i32 counterpart(i32 domain) const { return domain * scaleup_ranks + me % scaleup_ranks; }
    // Who deals with `rank` in our domain: itself, or its relay.
    MOECOMM_FN i32 local(i32 rank) const { return kCount == 1 ? rank : first() + rank % scaleup_ranks; }
    // As `rotated`, in our domain.
    MOECOMM_FN i32 neighbour(i32 step) const { return kCount == 1 ? (me + 1 + step) % ranks : first() + (me + 1 + step) % scaleup_ranks; }
};

}  // namespace moecomm
