// Our tokens come home: from every rank the sum over its experts, or those experts' rows themselves.
#pragma once
#include <algorithm>
#include <vector>

#include "combine.h"

namespace moecomm::host {

// The tokens of one thread: every `stride`-th chunk.  Nothing is pulled before all ranks agree on the combine.
class Home {
  public:
    // `scratch`: float[kColumns].
    Home(Combine& c, i32 worker, i32 stride, float* scratch);

    // The chunks whose rows are all here, up to the first that is not.
    void pull_in_order();
    // Those that are here now, in whatever order they became ready.  False: there was none.
    bool pull_ready();
    bool any_ready();
    // All the rest.
    void pull_all();

  private:
    struct Chunk {
        i32 number;
        u64 awaited;  // a bit a rank whose rows are not known to be here
        bool pulled;
    };

    // The ranks that have rows of the chunk's tokens.
    u64 owners(i32 chunk) const;
    u64 credit_of(i32 chunk) const { return credit_at(c_.a.ctx.window, c_.shape, c_.r.me, chunk, c_.a.chunk_tokens); }
    bool has_turn(i32 chunk) const;
    bool ready(Chunk& chunk);
    // Where to look for chunks that are ready: further on are none, or none that peers wait for.
    size_t horizon() const { return std::min(chunks_.size(), first_ + static_cast<size_t>(ring_)); }
    Missing missing() const;
    const u64* flag(i32 rank, i32 chunk) const {
        return at<const u64>(c_.a.ctx, c_.r.me, reduced_at(c_.a.ctx.window, c_.shape, rank, chunk));
    }
    void pull(Chunk& chunk);
    void grant_credit(i32 chunk) const;
    void pull_token(i32 token) const;
    const u8* single_row(i32 rank, i32 slot, i32 token) const;
    void add_in_place(float* sum, i32 token, i32 rank, i64 column, i64 n) const;
    void add_up(float* sum, i32 token, const i32* slot, i64 column, i64 n) const;
    void bring_grads(i32 token) const;

    Combine& c_;
    float* const scratch_;
    const i32 all_;              // chunks of our tokens
    const i32 ring_;             // how many of them staging holds
    std::vector<Chunk> chunks_;  // this thread's, in order
    size_t first_ = 0;           // all before it are pulled
};

}  // namespace moecomm::host
