// Sending: this rank's tokens to the owners of their experts.
#pragma once
#include <vector>

#include "deliver.h"

namespace moecomm::host {

// The chunks that one thread sends: every `stride`-th of this rank, in order.
class Sender {
  public:
    Sender(Dispatch& d, i32 worker, i32 stride) : d_(d), stride_(stride), next_(worker) {}

    bool done() const { return next_ >= d_.plan.own_chunks(); }
    i32 chunk() const { return next_; }
    // True if the next chunk's places in the forwarders' receive buffers are free (always true for direct rounds).
    bool has_place() const { return d_.direct || missing_credit() < 0; }
    Missing missing() const;
    // Place the tokens of the next chunk (unless the dispatch is a repeat), send them, and signal the chunk.  Requires has_place().
    void send();

  private:
    i32 chunk_before() const { return next_ - ring_chunks(d_.a.ctx.shape, d_.a.chunk_tokens); }
    const u64* credit(i32 domain) const { return d_.r.signal(receive_credit(d_.a.ctx.shape, domain, next_, d_.a.chunk_tokens)); }
    // True if this rank's tokens have a forwarder there.
    bool goes_to(i32 domain) const { return domain != d_.r.domain() && d_.r.forwarder(domain) >= 0; }
    // The first domain whose credit is missing, -1 for none.
    i32 missing_credit() const;
    void write_send_slot(const Token& token, const Payload& payload);
    void put(i32 domain, const Token& token);
    void put_direct(i32 domain, const Token& token);
    void signal_forwarders() const;
    void signal_owners() const;

    Dispatch& d_;
    const i32 stride_;
    i32 next_;
    std::vector<u8> packed_, send_slot_;
};

}  // namespace moecomm::host
