// Allocator of a window's heap, for outputs of dispatch, which peers write.  256-byte aligned, thread-safe.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../protocol/compiler.h"

namespace moecomm::runtime {

class Block;

class Arena : public std::enable_shared_from_this<Arena> {
  public:
    static constexpr u64 kAlignment = 256;

    // Manage the range [offset, offset + bytes), rounded inward to multiples of kAlignment.
    Arena(u64 offset, u64 bytes);

    // Allocate at least kAlignment bytes, so that every Block has a distinct offset; null if no free range is long enough.  First fit at
    // or above `from`; if there is none, first fit.
    std::shared_ptr<Block> allocate(u64 bytes, u64 from = 0);
    u64 begin() const { return begin_; }
    u64 end() const { return end_; }
    u64 used() const;
    u64 largest_free() const;

  private:
    friend class Block;
    void return_forward_chunk(u64 offset, u64 bytes);

    u64 begin_, end_;
    mutable std::mutex mutex_;
    std::map<u64, u64> free_;  // bytes by offset; adjacent ranges are always merged
    u64 used_ = 0;
};

// A range of the arena, freed when the last owner drops it (the Python object, and every tensor made from it).
class Block {
  public:
    Block(std::shared_ptr<Arena> arena, u64 offset, u64 bytes);
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block();

    u64 offset() const { return offset_; }
    u64 end() const { return offset_ + bytes_; }
    u64 bytes() const { return bytes_; }  // as requested, not rounded up
    // Free the tail; existing tensors must not reach past `bytes`.  Throws std::invalid_argument if `bytes` is larger than before.
    void shrink(u64 bytes);

  private:
    std::shared_ptr<Arena> arena_;
    u64 offset_;
    u64 bytes_;
};

// Memory behind the heap that a window has taken since it was opened.
struct Extension {
    std::shared_ptr<Arena> arena;
    u64 first_row;  // rows begin there, where they can
};

// Where blocks of a heap go: see moecomm.rounds.memory.  Offsets and bytes.  An interrupt of Python comes before a change or after it.
struct HeapParts {
    explicit HeapParts(std::shared_ptr<Arena> heap) : arena(std::move(heap)), reserved(arena) {}

    // Give the end of the arena to the reserve, and let rows begin at `first_row`.  Throws std::logic_error if the reserve has moved.
    void divide(u64 first_row, u64 reserve);
    // Let the reserve be a whole arena behind the first one.  `others` are for blocks that stay; `replayed` blocks are never freed.
    void move_reserve(std::shared_ptr<Arena> to, std::vector<Extension> others, std::vector<std::shared_ptr<Block>> replayed);

    std::shared_ptr<Arena> arena;
    std::shared_ptr<Arena> reserved;  // has the reserve, at its end
    u64 first_row = 0;                // rows begin there, where they can
    u64 end = 0;                      // of blocks that stay; the reserve follows
    u64 reserve = 0;
    u64 agreed = ~u64{0};  // a round of which no rank needs more than this finds room on all ranks
    std::vector<Extension> extensions;
    std::vector<std::shared_ptr<Block>> replayed;  // of earlier reserves, which graphs write to

    bool stays(const Block& block) const { return block.end() <= end || block.offset() >= reserved->end(); }
    // A block that stays, for tables or for rows; null if there is no such room.
    std::shared_ptr<Block> allocate_tables(u64 bytes) const;
    std::shared_ptr<Block> allocate_rows(u64 bytes) const;

  private:
    std::shared_ptr<Block> that_stays(std::shared_ptr<Block> block) const { return block != nullptr && stays(*block) ? block : nullptr; }
};

}  // namespace moecomm::runtime
