// Receiving: chunks that have arrived in this rank's window.
#pragma once
#include <vector>

#include "counters.h"
#include "dispatch.h"

namespace moecomm::host {

// The chunks that one thread receives: every `stride`-th of each source rank, in order.
class Inbox {
  public:
    Inbox(Dispatch& d, i32 worker, i32 stride) : d_(d), worker_(worker), stride_(stride), next_(d.r.ranks, worker) {}

    // Take all chunks that have arrived; does not wait.
    void take_arrived();
    // True if some source rank's chunk with a number up to `chunk` is missing.
    bool behind(i32 chunk) const;
    bool any_arrived() const;
    // Look whether the last chunk of each source rank has arrived, of those that this thread receives.
    void look_at_last(PeerWaits& waits) const;
    // True if any chunk is missing.
    bool open() const { return first_missing() >= 0; }
    Missing missing() const { return {first_missing(), flag(first_missing(), next_[first_missing()]), d_.r.tag}; }

  private:
    const u64* flag(i32 source, i32 chunk) const {
        return at<const u64>(d_.a.ctx, d_.r.me, arrived_at(d_.a.ctx.window, d_.a.ctx.shape, source, chunk));
    }
    i32 chunks_of(i32 source) const { return ceil_div(d_.sent(source).num_tokens, d_.sent(source).chunk_tokens); }
    bool open(i32 source) const { return next_[source] < chunks_of(source); }
    bool arrived(i32 source) const { return open(source) && has_tag(flag(source, next_[source]), d_.r.tag); }
    // The first source rank with a missing chunk, -1 for none.
    i32 first_missing() const;
    void take(i32 source, i32 chunk) const;
    void copy_to_experts(i32 slot) const;
    void store_scales(i32 slot) const;
    void store_scale_column(const u8* scales, i64 row) const;

    Dispatch& d_;
    const i32 worker_, stride_;
    std::vector<i32> next_;
};

// Flat layout: mark rows from num_rows to clear_rows as unused (expert ids -1, weights 0).
void clear_unused(const Dispatch& d);
// Expert layout: mark the padding rows of each group as unused (source -1, weights 0).
void clear_padding(const Dispatch& d);

}  // namespace moecomm::host
