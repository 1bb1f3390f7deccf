// Final reduction at the source rank: one reduced row (or, in place, the experts' rows) from every rank of this domain, and from every
// other domain the sum over its ranks (or, direct, one reduced row from each of its ranks).
#pragma once
#include "pull.h"

namespace moecomm::host {

class SourceReduce final : public Pull {
  public:
    SourceReduce(Combine& c, i32 worker, i32 stride, float* scratch) : Pull(c, own_tokens(c), worker, stride, scratch) {}

  private:
    bool scaleout_ready(i32 chunk) const override { return missing_rank(chunk) < 0; }
    Missing scaleout_missing(i32 chunk) const override;
    void pull_token(i32 token) override;
    void pass_on(i32 chunk) override;

    bool comes_from(i32 domain, i32 token) const;
    // The first rank of another domain whose sums, or direct rows, of the chunk are missing, -1 for none.
    i32 missing_rank(i32 chunk) const;
    i32 missing_owner(i32 chunk) const;
    const u64* direct_from(i32 rank) const { return c_.r.signal(direct_signal(c_.shape, c_.r.tag, rank)); }
    const u64* signal(i32 domain, i32 chunk) const { return c_.r.signal(returned_signal(c_.shape, domain, chunk, tokens_.chunk_tokens)); }
    const u8* returned(i32 domain, i32 token) const {
        return at<const u8>(c_.a.ctx, c_.r.me, returned_at(c_.a.ctx.window, c_.shape, domain, token));
    }
    void check_domains(i32 token) const;
    void check_row(i32 rank, i32 entries, i32 token, const u8* row, Type type) const;
    void add_direct(float* sum, i32 domain, i32 token, i64 column, i64 n) const;
    void add_domains(float* sum, i32 token, i64 column, i64 n) const;
    void load_grads(i32 token) const;
    const float* grads_of(i32 rank, i32 token) const;
    void sum_grads(i32 token, float* grads) const;

    const bool direct_ = goes_direct(c_.shape, tokens_.count);  // other domains put their rows without a return-forwarder
};

}  // namespace moecomm::host
