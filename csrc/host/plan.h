// Rows of one dispatch from the counts of all ranks, by the formulas of ../protocol/slots.h.
#pragma once
#include <memory>
#include <vector>

#include "round.h"

namespace moecomm::host {

// An invalid entry of this rank's topk_idx or topk_weights; `entry` is token * topk + k.
struct BadEntry {
    Argument argument = Argument::none;
    i64 entry = 0;
    i64 value = 0;
};
// Return the entry to report: an invalid id before an invalid weight, then the smaller index.
BadEntry worse(const BadEntry& a, const BadEntry& b);

class Plan {
  public:
    Plan(const DispatchArgs& args, const Round& round);

    // The caller's id of an entry, which another thread may change at any time.  Rows go by the ids that count() has read, once each.
    i64 read_id(i64 entry) const {
        if (a_.idx_bytes == 8) return static_cast<i64>(load_relaxed(memory<const u64>(a_.topk_idx) + entry));
        return static_cast<i32>(load_relaxed(memory<const u32>(a_.topk_idx) + entry));
    }
    // Expert id of a counted entry, token * topk + k; -1 for none.
    i32 id_at(i64 entry) const { return ids_[entry]; }
    i32 owner(i32 id) const { return ranges_.owner(id); }
    i32 local(i32 id) const { return ranges_.local(id); }

    i32 own_chunks() const { return ceil_div(a_.num_tokens, a_.chunk_tokens); }
    // Count one chunk of this rank's tokens: tokens per expert, then flat rows per rank.  Return the first error.  Chunks may be counted by
    // different threads.
    BadEntry count(i32 chunk);
    // Replace the counts of each chunk by their exclusive prefix sums.  Return this rank's totals, i32[columns]; all 0 if `bad`.
    const i32* total_up(bool bad);

    // Sum the counts of all ranks.  Call after Round::await_counts().
    void gather();
    // Check that every rank has room for its rows; every rank reaches the same result.
    ValidationResult validate_capacity() const;
    // Compute the first rows of this rank's tokens, and write the small outputs of dispatch.
    void place();
    // Write the outputs and the route of a round in which nothing arrives.
    void clear();
    // The next free row of each column for the tokens of a chunk; the sender increments them.  Call once per chunk.
    i32* cursors(i32 chunk);

    // Padding rows [filled, end) of a local expert: inside its aligned group but without a token (Layout::expert).
    struct Padding {
        i64 filled, end;
    };
    Padding padding(i32 expert, i64 group_start) const;
    i32 experts_here() const { return ranges_.count(r_.me); }

  private:
    // Chunk-major, because a sender uses all columns of one chunk.
    i32* before_chunk(i32 chunk) { return &before_[static_cast<i64>(chunk) * columns_]; }
    BadEntry bad_weight(i32 token, i32 end) const;
    // The expert of an entry, in a Buffer with a placement its slot; no valid id if `given` is none.
    i64 expert_of(i64 given, i64 entry) const;
    i64 rows_needed(i32 rank) const;
    void place_experts();
    void store_outputs();

    const DispatchArgs& a_;
    const Round& r_;
    const Shape& shape_;
    const i32 columns_;
    const ExpertRanges ranges_;
    std::unique_ptr<i32[]> ids_;  // by entry: the validated id; rows are assigned by the ids that were counted
    std::vector<i32> before_;     // by own chunk and column: its counts; after total_up() those of the chunks before it
    std::vector<i32> total_;      // by column: counts of this rank; after gather() of all ranks
    std::vector<i32> earlier_;    // by column: counts of lower ranks; after place() the row of this rank's first token
};

}  // namespace moecomm::host
