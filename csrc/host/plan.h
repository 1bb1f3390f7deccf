// From everybody's counts to rows: the arithmetic of ../protocol/slots.h for one dispatch.
#pragma once
#include <memory>
#include <vector>

#include "round.h"

namespace moecomm::host {

// A bad entry of our topk_idx or topk_weights; `entry` is token * topk + k.
struct BadEntry {
    Argument argument = Argument::none;
    i64 entry = 0;
    i64 value = 0;
};
// The one to report: a bad id before a bad weight, the first of a kind.
BadEntry worse(const BadEntry& a, const BadEntry& b);

class Plan {
  public:
    Plan(const DispatchArgs& args, const Round& round);

    // The k-th expert of a token that has been counted, by entry = token * topk + k; -1 for none.
    i32 id_at(i64 entry) const { return ids_[entry]; }
    i32 owner(i32 id) const { return id / experts_here_; }
    i32 local(i32 id) const { return id % experts_here_; }

    i32 own_chunks() const { return ceil_div(a_.num_tokens, a_.chunk_tokens); }
    // Counts one chunk of our tokens: tokens per expert, then flat rows per rank.  Returns what is wrong with it.
    BadEntry count(i32 chunk);
    // StepCounters the counts of our chunks into what lies before each of them, and returns our totals, i32[columns]; all 0 if `bad`.
    const i32* total_up(bool bad);

    // With everybody's counts here: adds them up.
    void gather();
    // Does everything fit?  Every rank comes to the same end.
    ValidationResult validate_capacity() const;
    // The rows our tokens get, and the small outputs of dispatch.
    void place();
    // What `place` fills, for a round in which nothing arrives.
    void clear();
    // The next free row by column for the tokens of a chunk; the sender counts them up.  One call a chunk.
    i32* cursors(i32 chunk);

    // The rows [filled, end) of our own window are padding: no token, but inside the aligned group of the local expert (Layout::expert).
    struct Padding {
        i64 filled, end;
    };
    Padding padding(i32 expert, i64 group_start) const;
    i32 experts_here() const { return experts_here_; }

  private:
    // A sender walks a row, so the columns of a chunk lie together.
    i32* before_chunk(i32 chunk) { return &before_[static_cast<i64>(chunk) * columns_]; }
    BadEntry bad_weight(i32 token, i32 end) const;
    // From the caller's tensor, which another thread may change at any time: read once an entry, by count().
    i64 read_id(i64 entry) const {
        if (a_.idx_bytes == 8) return static_cast<i64>(load_relaxed(memory<const u64>(a_.topk_idx) + entry));
        return static_cast<i32>(load_relaxed(memory<const u32>(a_.topk_idx) + entry));
    }
    i64 rows_needed(i32 rank) const;
    void place_experts();
    void store_outputs();

    const DispatchArgs& a_;
    const Round& r_;
    const Shape& shape_;
    const i32 columns_;
    const i32 experts_here_;
    std::unique_ptr<i32[]> ids_;  // by entry: what count() has read and found in range; what rows are given out by is what was counted
    std::vector<i32> before_;     // by chunk of ours and column: its counts, after total_up() those of the chunks before it
    std::vector<i32> total_;      // by column: of our own chunks, after gather() of all ranks
    std::vector<i32> earlier_;    // by column: of the ranks before us, after place() the row of our first token
};

}  // namespace moecomm::host
