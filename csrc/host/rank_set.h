// Set of ranks of the host executor.
#pragma once
#include "../protocol/compiler.h"

namespace moecomm::host {

class RankSet {
  public:
    void add(i32 rank) { words_[rank / kBits] |= 1ull << rank % kBits; }
    void remove(i32 rank) { words_[rank / kBits] &= ~(1ull << rank % kBits); }
    // The lowest rank, or -1 if there is none.
    i32 first() const {
        for (i32 word = 0; word < kMaxHostRanks / kBits; ++word)
            if (words_[word] != 0) return word * kBits + __builtin_ctzll(words_[word]);
        return -1;
    }

  private:
    static constexpr i32 kBits = 64;
    u64 words_[kMaxHostRanks / kBits] = {};
};

}  // namespace moecomm::host
