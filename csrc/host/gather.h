// Sum of a token's rows over the ranks of this domain.
#pragma once
#include "combine.h"

namespace moecomm::host {

// Routes of a source rank's tokens within this domain.
struct Tokens {
    i32 source_rank;
    i32 count, chunk_tokens;
    const i32* slots;             // per token [domain_ranks]: flat row at each rank of this domain, -1 for none
    const i32* rows;              // per token [topk]: row of each expert
    const i32* owners;            // per token [topk]
    i64 slot_pitch, entry_pitch;  // words from token to token

    const i32* slots_of(i32 token) const { return slots + token * slot_pitch; }
    const i32* rows_of(i32 token) const { return rows + token * entry_pitch; }
    const i32* owners_of(i32 token) const { return owners + token * entry_pitch; }
};
// The tokens of this rank, and of the rank with this rank's index in another domain.
Tokens own_tokens(const Combine& c);
Tokens forwarded_tokens(const Combine& c, i32 domain);

class Gather {
  public:
    Gather(const Combine& c, const Tokens& tokens) : c_(c), tokens_(tokens) {}

    // Sum n <= kColumns columns of the token over the ranks of this domain, in rank order, starting from `bias`, a row of bias_type (null:
    // from 0).
    void add_up(float* sum, i32 token, i64 column, i64 n, const u8* bias = nullptr) const;
    // With checks: compare the token's rows with what the ranks of this domain sent.
    void check(i32 token) const;
    // The gradient of the k-th expert's weight, as staged by `owner`, a rank of this domain.
    float grad(i32 token, i32 k, i32 owner) const {
        return reinterpret_cast<const float*>(c_.staged(owner, tokens_.source_rank, token) + c_.grads_at)[k];
    }

  private:
    // The one row that `rank` contributes to a token: a row of y or a staged row.
    struct Contribution {
        const u8* row;  // null: several rows, read in place
        Type type;
        float factor;
    };
    Contribution contribution(i32 rank, i32 slot, i32 token) const;
    u64 check_hash(i32 rank, i32 slot, i32 token) const;
    void add_in_place(float* sum, i32 token, i32 rank, i64 column, i64 n) const;
    // Append the token's k-th row, which its owner publishes.
    void append_in_place(Addends& rows, i32 token, i32 k) const;

    const Combine& c_;
    const Tokens& tokens_;
};

}  // namespace moecomm::host
