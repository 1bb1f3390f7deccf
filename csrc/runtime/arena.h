// Hands out ranges of a window's heap: outputs of dispatch, where peers write.  First fit, 256-byte aligned, thread-safe.
#pragma once
#include <map>
#include <memory>
#include <mutex>

#include "../protocol/compiler.h"

namespace moecomm::runtime {

class Block;

class Arena : public std::enable_shared_from_this<Arena> {
  public:
    static constexpr u64 kAlignment = 256;

    // The range [offset, offset + bytes), cut to whole units of kAlignment.
    Arena(u64 offset, u64 bytes);

    // At least one unit, so that every Block has an offset of its own; null if no free range is long enough.
    std::shared_ptr<Block> allocate(u64 bytes);
    u64 used() const;
    u64 largest_free() const;

  private:
    friend class Block;
    void return_forward_chunk(u64 offset, u64 bytes);

    mutable std::mutex mutex_;
    std::map<u64, u64> free_;  // bytes by offset; neighbours are always joined
    u64 used_ = 0;
};

// A range of the arena; goes back when the last owner drops it (the Python object, and every tensor made of it).
class Block {
  public:
    Block(std::shared_ptr<Arena> arena, u64 offset, u64 bytes);
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block();

    u64 offset() const { return offset_; }
    u64 bytes() const { return bytes_; }  // as asked for
    // Gives the tail back; tensors made of it before must not reach past `bytes`.  Throws std::invalid_argument if it would grow.
    void shrink(u64 bytes);

  private:
    std::shared_ptr<Arena> arena_;
    u64 offset_;
    u64 bytes_;
};

}  // namespace moecomm::runtime
