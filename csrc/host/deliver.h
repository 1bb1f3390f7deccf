// Delivery of tokens to their owners in this domain: this rank's own tokens, forwarded ones, and those that arrived direct.
#pragma once
#include <algorithm>

#include "dispatch.h"

namespace moecomm::host {

// A token and its destinations in this domain.
struct Token {
    i32 source, number;
    const Entry* entries;  // [topk]; owners may be in other domains
    const i32* slots;      // [domain_ranks]: flat row at each rank of this domain, -1 for none
};

// A row as stored at its owners: quantized if the dispatch quantizes.
struct Payload {
    const u8* row;
    const u8* scales;
};

// Delivers the tokens of one chunk of one source rank, in order, to all ranks of this domain or to this rank alone.
class Delivery {
  public:
    Delivery(const Dispatch& d, i32 source, i32 chunk, bool to_us_alone = false)
        : d_(d), source_(source), chunk_(chunk), first_step_(to_us_alone ? d.r.scaleup_ranks - 1 : 0) {
        std::fill_n(first_, d.r.scaleup_ranks, 0);
        std::fill_n(count_, d.r.scaleup_ranks, 0);
    }
    void deliver(const Token& token, const Payload& payload);
    // Signal the chunk to every destination, with release.  This rank's own flag comes last: a forwarder resumes by it (skip_forwarded).
    void raise_flags() const;

  private:
    void store_payload(const Token& token, i32 rank, i32 slot, const Payload& payload) const;
    void store_metadata(const Token& token, i32 rank, i32 slot) const;

    const Dispatch& d_;
    const i32 source_, chunk_, first_step_;
    i32 first_[kMaxHostRanks], count_[kMaxHostRanks];  // by rank of this domain: the flat rows delivered there
};

}  // namespace moecomm::host
