// The rows of one token, wherever they lie in our domain, and their sum.
#pragma once
#include "combine.h"

namespace moecomm::host {

// Where the tokens of a home went, as far as they went to our domain.
struct Tokens {
    i32 source_rank;
    i32 count, chunk_tokens;
    const i32* slots;  // of a token: the flat row at each rank of our domain, -1 where none
    const i32* rows;   // of a token: the row of each of its k experts
    const i32* owners;
    i64 slot_pitch, entry_pitch;  // from token to token

    const i32* slots_of(i32 token) const { return slots + token * slot_pitch; }
    const i32* rows_of(i32 token) const { return rows + token * entry_pitch; }
    const i32* owners_of(i32 token) const { return owners + token * entry_pitch; }
};
// Ours, and those of the rank with our index in another domain.
Tokens own_tokens(const Combine& c);
Tokens forwarded_tokens(const Combine& c, i32 domain);

class Gather {
  public:
    Gather(const Combine& c, const Tokens& tokens) : c_(c), tokens_(tokens) {}

    // The sum over the ranks of our domain, in the order of the ranks, of n <= kColumns columns.
    void add_up(float* sum, i32 token, i64 column, i64 n) const;
    // The gradient of the weight of the k-th expert, which `owner`, of our domain, has staged.
    float grad(i32 token, i32 k, i32 owner) const {
        return reinterpret_cast<const float*>(c_.staged(owner, tokens_.source_rank, token) + c_.grads_at)[k];
    }

  private:
    const u8* single_row(i32 rank, i32 slot, i32 token) const;
    void add_in_place(float* sum, i32 token, i32 rank, i64 column, i64 n) const;

    const Combine& c_;
    const Tokens& tokens_;
};

}  // namespace moecomm::host
