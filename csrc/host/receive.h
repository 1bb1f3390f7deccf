// The tokens that arrive here.
#pragma once
#include <vector>

#include "dispatch.h"

namespace moecomm::host {

// The chunks that one thread has yet to receive: every `stride`-th of each source, in order.
class Inbox {
  public:
    Inbox(Dispatch& d, i32 worker, i32 stride) : d_(d), stride_(stride), next_(d.r.ranks, worker) {}

    // Everything that is here by now.
    void take_arrived();
    // Is a chunk still missing that comes no later in its source than `chunk` in ours?
    bool behind(i32 chunk) const;
    bool any_arrived() const;
    // Is anything missing?
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
    // The first source that has not sent all, -1 if all have.
    i32 first_missing() const;
    void take(i32 source, i32 chunk) const;
    void copy_to_experts(i32 slot) const;
    void store_scales(i32 slot) const;
    void store_scale_column(const u8* scales, i64 row) const;

    Dispatch& d_;
    const i32 stride_;
    std::vector<i32> next_;
};

// Flat rows past those that come, if they are to say so, belong to nobody.
void clear_unused(const Dispatch& d);
// Rows between a group's last token and the next group belong to nobody.
void clear_padding(const Dispatch& d);

}  // namespace moecomm::host
