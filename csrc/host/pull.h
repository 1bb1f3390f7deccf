// The tokens of a home are pulled from the ranks of our domain: by the home itself, or by us who relay for it.
#pragma once
#include <algorithm>
#include <vector>

#include "gather.h"

namespace moecomm::host {

// The tokens of one thread: every `stride`-th chunk.  Nothing is pulled before all ranks agree on the combine.
class Pull {
  public:
    // `scratch`: float[kColumns].
    Pull(Combine& c, const Tokens& tokens, i32 worker, i32 stride, float* scratch);
    virtual ~Pull() = default;
    Pull(const Pull&) = delete;
    Pull& operator=(const Pull&) = delete;

    // The chunks whose rows are all here, up to the first that is not.
    void pull_in_order();
    // Those that are here now, in whatever order they became ready.  False: there was none.
    bool pull_ready();
    bool any_ready();
    bool done() const { return first_ == chunks_.size(); }
    // What the first chunk waits for.
    Missing missing() const;

  protected:
    struct Chunk {
        i32 number;
        u64 awaited;  // a bit a rank of our domain whose rows are not known to be here
        bool pulled;
    };

    i32 first_token(i32 chunk) const { return chunk * tokens_.chunk_tokens; }
    i32 end_token(i32 chunk) const { return std::min(first_token(chunk) + tokens_.chunk_tokens, tokens_.count); }
    // Does a later chunk wait for the place of this one?
    bool followed(i32 chunk) const { return chunk + ring_ < all_; }

    Combine& c_;
    const Tokens tokens_;
    const Gather gather_;
    float* const scratch_;
    const i32 all_;   // chunks of the tokens
    const i32 ring_;  // how many of them a ring holds

  private:
    // Other domains: what must be here, or have a place, before a chunk is pulled; and what is still missing then, if anything.
    virtual bool scaleout_ready(i32 chunk) const = 0;
    virtual Missing scaleout_missing(i32 chunk) const = 0;
    virtual void pull_token(i32 token) = 0;
    // All tokens of the chunk are pulled.
    virtual void pass_on(i32 chunk) = 0;

    u64 owners(i32 chunk) const;
    u64 credit_of(i32 chunk) const { return credit_at(c_.a.ctx.window, c_.shape, tokens_.source_rank, chunk, tokens_.chunk_tokens); }
    bool has_step(i32 chunk) const;
    bool ready(Chunk& chunk);
    // Where to look for chunks that are ready: further on are none, or none that peers wait for.
    size_t horizon() const { return std::min(chunks_.size(), first_ + static_cast<size_t>(ring_)); }
    const u64* flag(i32 rank, i32 chunk) const {
        return at<const u64>(c_.a.ctx, c_.r.me, reduced_for(c_.a.ctx.window, c_.shape, tokens_.source_rank, rank, chunk));
    }
    void pull(Chunk& chunk);
    void grant_credit(i32 chunk) const;

    std::vector<Chunk> chunks_;  // this thread's, in order
    size_t first_ = 0;           // all before it are pulled
};

}  // namespace moecomm::host
