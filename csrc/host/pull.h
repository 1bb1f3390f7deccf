// Pull of a source rank's reduced rows from the ranks of this domain: by the source rank itself, or by its return-forwarder.
#pragma once
#include <algorithm>
#include <vector>

#include "counters.h"
#include "gather.h"
#include "rank_set.h"

namespace moecomm::host {

// Pulls every `stride`-th chunk from chunk `worker` on, in one thread.  Call only after the round has been validated.
class Pull {
  public:
    // `scratch`: float[kColumns].
    Pull(Combine& c, const Tokens& tokens, i32 worker, i32 stride, float* scratch);
    virtual ~Pull() = default;
    Pull(const Pull&) = delete;
    Pull& operator=(const Pull&) = delete;

    // Pull ready chunks in order, up to the first that is not ready.
    void pull_in_order();
    // Pull all ready chunks within the ring, in any order.  False if there was none.
    bool pull_ready();
    bool any_ready();
    bool done() const { return first_ == chunks_.size(); }
    // Look whether the rows of each rank of this domain in the last chunk that it has rows in have arrived, of this thread's chunks.
    void look_at_last(PeerWaits& waits) const;
    // The flag that the first open chunk waits for.
    Missing missing() const;

  protected:
    struct Chunk {
        i32 number;
        RankSet awaited;  // ranks, by their index in this domain, that have not signaled their rows yet
        bool pulled;
    };

    i32 first_token(i32 chunk) const { return chunk * tokens_.chunk_tokens; }
    i32 end_token(i32 chunk) const { return std::min(first_token(chunk) + tokens_.chunk_tokens, tokens_.count); }
    // True if a later chunk reuses the ring place of this one.
    bool followed(i32 chunk) const { return chunk + ring_ < all_; }

    Combine& c_;
    const Tokens tokens_;
    const Gather gather_;
    float* const scratch_;
    const i32 all_;   // chunks of all threads
    const i32 ring_;  // chunks that a ring holds

  private:
    // Conditions of other domains on pulling a chunk (rows have arrived, or room to return them), and the flag that is missing.
    virtual bool scaleout_ready(i32 chunk) const = 0;
    virtual Missing scaleout_missing(i32 chunk) const = 0;
    virtual void pull_token(i32 token) = 0;
    // Called after all tokens of the chunk are pulled: signals other domains.
    virtual void pass_on(i32 chunk) = 0;

    RankSet owners(i32 chunk) const;
    u64 credit_of(i32 chunk) const { return credit_at(c_.a.ctx.window, c_.shape, tokens_.source_rank, chunk, tokens_.chunk_tokens); }
    bool has_step(i32 chunk) const;
    bool ready(Chunk& chunk);
    // End of the search for ready chunks: no peer waits for a later one.
    size_t horizon() const { return std::min(chunks_.size(), first_ + static_cast<size_t>(ring_)); }
    const u64* flag(i32 rank, i32 chunk) const {
        return at<const u64>(c_.a.ctx, c_.r.me, reduced_for(c_.a.ctx.window, c_.shape, tokens_.source_rank, rank, chunk));
    }
    void pull(Chunk& chunk);
    void grant_credit(i32 chunk) const;

    std::vector<Chunk> chunks_;  // of this thread, in order
    size_t first_ = 0;           // chunks before it are pulled
    std::vector<i32> last_;      // by rank of this domain: the last of these chunks in which it has rows, -1 for none
};

}  // namespace moecomm::host
