#include "arena.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace moecomm::runtime {
namespace {

u64 units(u64 bytes) { return align_up(std::max<u64>(bytes, 1), Arena::kAlignment); }

}  // namespace

Arena::Arena(u64 offset, u64 bytes) {
    if (offset + bytes < offset) throw std::invalid_argument("the range of an arena wraps around");
    begin_ = align_up(offset, kAlignment);
    end_ = std::max(begin_, (offset + bytes) / kAlignment * kAlignment);
    if (end_ > begin_) free_.emplace(begin_, end_ - begin_);
}

std::shared_ptr<Block> Arena::allocate(u64 bytes, u64 from) {
    std::lock_guard lock(mutex_);
    if (bytes > ~u64{0} - kAlignment) return nullptr;
    const u64 need = units(bytes);
    u64 first = align_up(std::min(from, end_), kAlignment);
    const auto fits = [&](const auto& range) { return range.first + range.second >= std::max(first, range.first) + need; };
    auto fit = std::find_if(free_.begin(), free_.end(), fits);
    if (fit == free_.end() && first > 0) {
        first = 0;
        fit = std::find_if(free_.begin(), free_.end(), fits);
    }
    if (fit == free_.end()) return nullptr;
    const auto [low, size] = *fit;
    const u64 offset = std::max(first, low), high = low + size;
    auto block = std::make_shared<Block>(shared_from_this(), offset, bytes);
    free_.erase(fit);
    if (offset > low) free_.emplace(low, offset - low);
    if (high > offset + need) free_.emplace(offset + need, high - offset - need);
    used_ += need;
    return block;
}

void Arena::return_forward_chunk(u64 offset, u64 bytes) {
    std::lock_guard lock(mutex_);
    used_ -= bytes;
    auto next = free_.lower_bound(offset);
    if (next != free_.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == offset) {
            offset = before->first;
            bytes += before->second;
            free_.erase(before);
        }
    }
    if (next != free_.end() && offset + bytes == next->first) {
        bytes += next->second;
        free_.erase(next);
    }
    free_.emplace(offset, bytes);
}

u64 Arena::used() const {
    std::lock_guard lock(mutex_);
    return used_;
}

u64 Arena::largest_free() const {
    std::lock_guard lock(mutex_);
    u64 largest = 0;
    for (const auto& [offset, bytes] : free_) largest = std::max(largest, bytes);
    return largest;
}

Block::Block(std::shared_ptr<Arena> arena, u64 offset, u64 bytes) : arena_(std::move(arena)), offset_(offset), bytes_(bytes) {}

Block::~Block() { arena_->return_forward_chunk(offset_, units(bytes_)); }

void Block::shrink(u64 bytes) {
    if (bytes > bytes_)
        throw std::invalid_argument("a block of " + std::to_string(bytes_) + " bytes cannot shrink to " + std::to_string(bytes));
    const u64 keep = units(bytes), had = units(bytes_);
    bytes_ = bytes;
    if (had > keep) arena_->return_forward_chunk(offset_ + keep, had - keep);
}

void HeapParts::divide(u64 first_row, u64 reserve) {
    if (reserved != arena) throw std::logic_error("the reserve has moved to memory that the window has taken");
    this->first_row = first_row;
    this->reserve = std::min(align_up(reserve, Arena::kAlignment), arena->end() - arena->begin());
    end = arena->end() - this->reserve;
}

void HeapParts::move_reserve(std::shared_ptr<Arena> to, std::vector<Extension> others, std::vector<std::shared_ptr<Block>> replayed) {
    std::move(others.begin(), others.end(), std::back_inserter(extensions));
    std::move(replayed.begin(), replayed.end(), std::back_inserter(this->replayed));
    reserved = std::move(to);
    end = reserved->begin();
    reserve = reserved->end() - end;
}

std::shared_ptr<Block> HeapParts::allocate_tables(u64 bytes) const {
    if (auto block = that_stays(arena->allocate(bytes))) return block;
    for (const Extension& extension : extensions)
        if (auto block = extension.arena->allocate(bytes)) return block;
    return nullptr;
}

std::shared_ptr<Block> HeapParts::allocate_rows(u64 bytes) const {
    if (auto block = that_stays(arena->allocate(bytes, first_row))) return block;
    for (const Extension& extension : extensions)
        if (auto block = extension.arena->allocate(bytes, extension.first_row)) return block;
    return nullptr;
}

}  // namespace moecomm::runtime
