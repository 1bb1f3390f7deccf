// Checks of the rows that a combine moves.  Who writes a row leaves its hash in a table outside of the windows; who is about to add the row
// up hashes it again and compares.
#pragma once
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../protocol/layout.h"

namespace moecomm::host {

// A change within one word of 8 bytes always changes the hash, another one goes unseen with a probability of 2^-64.
u64 hash_row(const u8* row, i64 bytes, u64 seed = 0);

// A row that is not what `from` sent: of the token `token` of `source_rank`.
struct CorruptRow {
    i32 from, source_rank, token;
};

// The tables of all ranks, as one rank sees them.  Its threads may call concurrently.
//
// A table has an entry for each row that its rank sends: for each token of every rank, and, with several domains, for each sum that it
// return-forwards.  Entries are stored before the signal that publishes the row.  There are two tables, for even and odd rounds:
// a rank that is ahead is in the next round at most.
class RowChecks {
  public:
    // `tables`: by rank, the address of its table of table_bytes(shape).
    RowChecks(const Shape& shape, i32 rank, std::vector<u64> tables) : shape_(shape), rank_(rank), tables_(std::move(tables)) {}

    static u64 table_bytes(const Shape& shape);

    // Entries of the rows for a source rank's tokens, and of the sums that are returned to it from another domain.
    i32 rows_of(i32 source_rank) const { return source_rank; }
    i32 sums_of(i32 source_rank) const;

    // Leave the hash of a row that this rank is about to publish in the round of `tag`.
    void sent(u32 tag, i32 entries, i32 token, u64 hash);
    // Compare a row that arrived from `from` with what it sent.
    void compare(u32 tag, i32 entries, const CorruptRow& row, u64 hash);
    // The first row that differed since the last call.
    std::optional<CorruptRow> take();

    // For tests: flip a bit of this row once, before it is hashed.  Of a row in place, in the first of the token's rows.
    void flip_later(const CorruptRow& row, i64 bit);
    void flip_now(const CorruptRow& row, const u8* bytes, i64 n);
    // True once the flip has been made.
    bool flipped() const { return !flip_; }

  private:
    struct Flip {
        CorruptRow row;
        i64 bit;
    };
    u64* entry(i32 rank, u32 tag, i32 entries, i32 token) const;

    const Shape shape_;
    const i32 rank_;
    const std::vector<u64> tables_;
    std::optional<CorruptRow> first_;
    std::optional<Flip> flip_;
    std::mutex mutex_;
};

}  // namespace moecomm::host
