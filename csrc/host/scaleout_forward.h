// Forwarding: tokens of other domains arrive in this rank's receive buffer, and go on to the ranks of this domain.
#pragma once
#include <vector>

#include "deliver.h"

namespace moecomm::host {

// The chunks that one thread forwards: every `stride`-th of the source rank of each column of this rank's rings, in order.
class Forward {
  public:
    Forward(Dispatch& d, i32 worker, i32 stride);

    // Forward all chunks that have arrived; does not wait.
    void forward_arrived();
    bool any_arrived() const;
    // True if a chunk has not been forwarded yet.
    bool open() const { return first_open(0) != nullptr; }
    // True if a source rank may still wait for a credit of this thread.  The first half of a split dispatch must grant these.
    bool owes_credit() const { return first_open(1) != nullptr; }
    Missing missing() const;

  private:
    struct Column {
        i32 number, source;
        i32 next;  // chunk to forward
    };
    const SourceTokens& sent(const Column& column) const { return d_.sent(column.source); }
    i32 chunks(const Column& column) const {
        return d_.direct_from(column.source) ? 0 : ceil_div(sent(column).num_tokens, sent(column).chunk_tokens);
    }
    i32 ring(const Column& column) const { return ring_chunks(d_.a.ctx.shape, sent(column).chunk_tokens); }
    const u64* signal(const Column& column) const {
        return d_.r.signal(received_signal(d_.a.ctx.shape, column.number, column.next, sent(column).chunk_tokens));
    }
    bool has_arrived(const Column& column) const;
    // The first column with an open chunk that `rings` ring lengths of chunks follow, null for none.
    const Column* first_open(i32 rings) const;
    void skip_forwarded(Column& column);
    void forward_chunk(const Column& column) const;
    void record_route(i32 source, i32 token, const Token* arrived) const;

    Dispatch& d_;
    const i32 stride_;
    std::vector<Column> columns_;
};

}  // namespace moecomm::host
