// Tokens to their owners in our domain: our own, and those that we relay.
#pragma once
#include "dispatch.h"

namespace moecomm::host {

// A token on its way through a domain.
struct Token {
    i32 source, number;
    const Entry* entries;  // [topk]; owners may be in other domains
    const i32* slots;      // [domain_ranks]: flat row at each rank of our domain, -1 where it has none
};

// A row as it travels.
struct Payload {
    const u8* row;
    const u8* scales;
};

// The tokens of one chunk of a source, in order; to all of our domain, or to ourselves alone.
class Delivery {
  public:
    Delivery(const Dispatch& d, i32 source, i32 chunk, bool to_us_alone = false)
        : d_(d), source_(source), chunk_(chunk), first_step_(to_us_alone ? d.r.scaleup_ranks - 1 : 0) {}
    void deliver(const Token& token, const Payload& payload);
    // All are delivered.  Ourselves last: so a relay can tell what it has relayed.
    void raise_flags() const;

  private:
    void store_payload(const Token& token, i32 rank, i32 slot, const Payload& payload) const;
    void store_metadata(const Token& token, i32 rank, i32 slot) const;

    const Dispatch& d_;
    const i32 source_, chunk_, first_step_;
    i32 first_[kMaxRanks] = {}, count_[kMaxRanks] = {};  // by rank of our domain: its flat rows
};

}  // namespace moecomm::host
