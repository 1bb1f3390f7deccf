// Return-forwarding: this rank sums its domain's rows of another domain's tokens and puts one sum per token to the source rank.
#pragma once
#include "pull.h"

namespace moecomm::host {

// Return-forwards the tokens of the source rank of one column of this rank's rings.
class ReturnForward final : public Pull {
  public:
    ReturnForward(Combine& c, i32 column, i32 worker, i32 stride, float* scratch)
        : Pull(c, forwarded_tokens(c, c.r.source_of(column)), worker, stride, scratch), column_(column), row_(c.shape.staged_row_bytes) {}

  private:
    bool scaleout_ready(i32 chunk) const override;
    Missing scaleout_missing(i32 chunk) const override { return {tokens_.source_rank, credit(chunk), c_.r.tag}; }
    void pull_token(i32 token) override;
    void pass_on(i32 chunk) override;

    bool ours(i32 token) const;
    bool any_ours(i32 chunk) const;
    const u64* credit(i32 chunk) const { return c_.r.signal(return_credit(c_.shape, column_, chunk, tokens_.chunk_tokens)); }

    const i32 column_;
    std::vector<u8> row_;  // the sum in the wire dtype, then the weight gradients
};

}  // namespace moecomm::host
