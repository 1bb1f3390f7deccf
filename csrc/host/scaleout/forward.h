// Forwarding: tokens of other domains arrive in this rank's receive buffer, and go on to the ranks of this domain.
#pragma once
#include <vector>

#include "../deliver.h"

namespace moecomm::host {

// The chunks that one thread forwards: every `stride`-th of the rank with this rank's index in each other domain, in order.
class Forward {
  public:
    Forward(Dispatch& d, i32 worker, i32 stride);

    // Forward all chunks that have arrived; does not wait.
    void forward_arrived();
    bool any_arrived() const;
    // True if a chunk has not been forwarded yet.
    bool open() const { return first_open(0) >= 0; }
    // True if a source rank may still wait for a credit of this thread.  The first half of a split dispatch must grant these.
    bool owes_credit() const { return first_open(1) >= 0; }
    Missing missing() const;

  private:
    i32 source(i32 domain) const { return d_.r.counterpart(domain); }
    const SourceTokens& sent(i32 domain) const { return d_.sent(source(domain)); }
    i32 chunks(i32 domain) const {
        return d_.direct_from(source(domain)) ? 0 : ceil_div(sent(domain).num_tokens, sent(domain).chunk_tokens);
    }
    i32 ring(i32 domain) const { return ring_chunks(d_.a.ctx.shape, sent(domain).chunk_tokens); }
    const u64* signal(i32 domain) const {
        return d_.r.signal(received_signal(d_.a.ctx.shape, domain, next_[domain], sent(domain).chunk_tokens));
    }
    bool has_arrived(i32 domain) const;
    // The first domain with an open chunk that `rings` ring lengths of chunks follow, -1 for none.
    i32 first_open(i32 rings) const;
    void skip_forwarded(i32 domain);
    void forward_chunk(i32 domain, i32 chunk) const;
    void record_route(i32 domain, i32 token, const Token* arrived) const;

    Dispatch& d_;
    const i32 stride_;
    std::vector<i32> next_;  // by domain: the next chunk to forward
};

}  // namespace moecomm::host
