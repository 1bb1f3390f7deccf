// Domains, and the forwarders between them: ranks that stand in for masked ones, and the rings that they then share
// (csrc/protocol/stand_ins.h).
#pragma once
#include "../device/lanes.cuh"
#include "../device/wait.cuh"
#include "../protocol/stand_ins.h"

namespace moecomm {

// This rank's domain, which loads and stores reach, and the other domains, which puts reach (csrc/protocol/domains.h). Called by any
// thread. With one domain, all of it is known at compile time.
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

// A ring at a peer of another domain: the peer, this rank's column for it, and its column for this rank.
struct PeerRing {
    i32 peer, column, there;
};

// In shared memory.
template <i32 ranks, i32 scaleup_ranks>
struct Forwarders {
    static constexpr i32 kOthers = ranks / scaleup_ranks - 1;
    using Domain = Domains<ranks, scaleup_ranks>;

    Shape shape;                  // with the length of rings of this round
    i32 share_bits;               // there are at most 1 << share_bits shares of a ring
    short by[ranks];              // by forwarder: the rank that stands in for it, itself unless it is masked; -1: none is left
    short share[ranks];           // by forwarder: in which share of its rings
    short as[2 * scaleup_ranks];  // by share: the rank in whose name this rank forwards; -1: none

    // The rank that forwards this rank's tokens in a domain; -1: none.
    MOECOMM_FN i32 of(Domain d, i32 domain) const { return by[d.counterpart(domain)]; }
    // Its ring for this rank, and this rank's for it.
    MOECOMM_FN PeerRing ring_to(Domain d, i32 domain) const {
        return {of(d, domain), domain, share[d.counterpart(domain)] * Domain::kCount + d.own()};
    }
    // The rank of this domain that exchanges data with `rank`: `rank` itself, or its forwarder.
    MOECOMM_FN i32 local(Domain d, i32 rank) const { return d.reaches(rank) ? rank : by[d.local(rank)]; }

    // Columns of this rank's rings in which it forwards: the n-th other domain of each share, 0 <= n < count(). Some have no source rank.
    MOECOMM_FN i32 count() const { return kOthers << share_bits; }
    MOECOMM_FN static i32 domain_of(Domain d, i32 nth) { return d.other(nth % kOthers); }
    MOECOMM_FN static i32 column_of(Domain d, i32 nth) { return nth / kOthers * Domain::kCount + domain_of(d, nth); }
    // The source rank of such a column; -1: none.
    MOECOMM_FN i32 source_of(Domain d, i32 nth) const {
        const i32 forwarder = as[nth / kOthers];
        return forwarder < 0 ? -1 : domain_of(d, nth) * scaleup_ranks + forwarder % scaleup_ranks;
    }
};

// One domain.
template <i32 ranks>
struct Forwarders<ranks, ranks> {
    MOECOMM_FN static i32 local(Domains<ranks, ranks>, i32 rank) { return rank; }
};

// The ranks that take no part. Called by any thread, even before earlier kernels have ended: only the host writes them.
MOECOMM_FN u64 read_masked(const Context& ctx) { return load_relaxed(&own_mask(ctx).ranks[0]); }

// find_forwarders where ranks are masked. Not inlined, so that rounds without a mask need no registers for it.
template <i32 ranks, i32 scaleup_ranks>
__device__ __noinline__ void find_stand_ins(Forwarders<ranks, scaleup_ranks>& f, const Context& ctx, u64 masked, i32 threads) {
    const i32 shares = ring_shares(ctx.shape, masked);
    i32 bits = 0;
    while (1 << bits < shares) ++bits;
    for (i32 i = threadIdx.x; i < ranks; i += threads) {
        const StandIn found = stand_in(ctx.shape, masked, i);
        f.by[i] = static_cast<short>(found.rank);
        f.share[i] = static_cast<short>(found.share);
    }
    for (i32 i = threadIdx.x; i < 1 << bits; i += threads)
        f.as[i] = static_cast<short>(i < shares ? forwards_as(ctx.shape, masked, ctx.rank, i) : -1);
    if (threadIdx.x != 0) return;
    f.shape = ctx.shape;
    f.shape.ring_tokens = shared_ring_tokens(ctx.shape.ring_tokens, shares);
    f.share_bits = bits;
}

// Called by all threads of a block before a barrier. Cannot fail.
template <i32 ranks, i32 scaleup_ranks>
MOECOMM_FN void find_forwarders(Forwarders<ranks, scaleup_ranks>& f, const Context& ctx, u64 masked, i32 threads) {
    if (masked != 0) return find_stand_ins(f, ctx, masked, threads);
    for (i32 i = threadIdx.x; i < ranks; i += threads) {
        f.by[i] = static_cast<short>(i);
        f.share[i] = 0;
    }
    if (threadIdx.x != 0) return;
    f.shape = ctx.shape;
    f.as[0] = static_cast<short>(ctx.rank);
    f.share_bits = 0;
}

}  // namespace moecomm
