// The counters of ../protocol/counters.h on CPU ranks.
#pragma once
#include <vector>

#include "../protocol/counters.h"
#include "dispatch.h"

namespace moecomm::host {

// Count a round that this rank begins.
void count_round(const Context& ctx);

// Count the rows of a valid dispatch: from every rank to this one, from this one to every rank, and by local expert.
void count_rows(const Dispatch& d);

// The time that one thread waits for each peer. Reads the clock only once a look was in vain.
class PeerWaits {
  public:
    // `which`: the counter of these waits.
    PeerWaits(const Context& ctx, Counter which) : ctx_(ctx), which_(which) {}
    ~PeerWaits();  // counts waits that have not ended
    PeerWaits(const PeerWaits&) = delete;
    PeerWaits& operator=(const PeerWaits&) = delete;

    // The thread has looked for the word of `peer`, which has arrived, or not.
    void look(i32 peer, bool arrived);

  private:
    const Context& ctx_;
    const Counter which_;
    std::vector<u64> since_;  // by peer: when a look was in vain first; 0: none was, or the word has arrived
};

}  // namespace moecomm::host
