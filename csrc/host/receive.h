// Receiving: chunks that have arrived in this rank's window.
#pragma once
#include <vector>

#include "dispatch.h"

namespace moecomm::host {

// The chunks that one thread receives: every `stride`-th of each source rank, in order.
class Inbox {
  public:
    Inbox(Dispatch& d, i32 worker, i32 stride) : d_(d), stride_(stride), next_(d.r.ranks, worker) {}

    // Take all chunks that have arrived; does not wait.
    void take_arrived();
    // True if some source rank's chunk with a number up to `chunk` is missing.
    bool behind(i32 chunk) const;
    bool any_arrived() const;
    // True if any chunk is missing.
    bool open() const { return first_missing() >= 0; }
    Missing missing() const { return {first_missing(), flag(first_missing(), next_[first_missing()]), d_.r.tag}; }

  private:
    const u64* flag(i32 source, i32 chunk) const {
        return at<const u64>(d_.a.ctx, d_.r.me, arrived_at(d_.a.ctx.window, d_.a.ctx.shape, source, chunk));
    }
    bool open(i32 source) const {
        const SourceTokens& sent = memory<const SourceTokens>(d_.a.route.sent)[source];
        return next_[source] < ceil_div(sent.num_tokens, sent.chunk_tokens);
    }
    bool arrived(i32 source) const { return open(source) && has_tag(flag(source, next_[source]), d_.r.tag); }
    // The first source rank with a missing chunk, -1 for none.
    i32 first_missing() const;
    void take(i32 source, i32 chunk) const;
    void copy_to_experts(i32 slot) const;
    void store_scales(i32 slot) const;
    void store_scale_column(const u8* scales, i64 row) const;

    Dispatch& d_;
    const i32 stride_;
    std::vector<i32> next_;
};

// Flat layout: mark rows from num_rows to clear_rows as unused (expert ids -1, weights 0).
void clear_unused(const Dispatch& d);
// Expert layout: mark the padding rows of each group as unused (source -1, weights 0).
void clear_padding(const Dispatch& d);

}  // namespace moecomm::host
