// Registered memory of this rank, and the matching registration of every other rank.
#pragma once
#include <memory>
#include <unordered_map>
#include <vector>

#include "failure.h"
#include "gpu.h"

namespace moecomm::rma {

struct Remote {
    uint64_t bytes = 0;
    char* at = nullptr;      // its address in this process; null: not mapped
    char* mapped = nullptr;  // the mapped allocation, if there is one
    size_t mapped_bytes = 0;
};

struct Region {
    uint32_t id = 0;  // the same on all ranks, because registration is collective
    char* base = nullptr;
    uint64_t bytes = 0;
    bool on_gpu = false;
    bool registered = true;
    bool never_reset = false;      // its words are signals that only this plugin writes
    std::vector<Remote> remote;    // by rank
    std::vector<uint64_t> shadow;  // current values of its words, if never_reset: GPU memory need not be read
};

// True if [at, at + bytes) is inside `size` bytes.
inline bool fits(uint64_t at, uint64_t bytes, uint64_t size) { return bytes <= size && at <= size - bytes; }

// Regions by handle, for NCCL, and by id, for peers.
class Registry {
  public:
    uint32_t next_id() const { return static_cast<uint32_t>(by_id_.size()); }
    void add(std::shared_ptr<Region> region) {
        by_handle_[region.get()] = region;
        by_id_.push_back(std::move(region));
    }
    // The id is not used again: a late put to it is an error, a late signal is dropped, and neither can reach other memory.
    void remove(const Region& region) {
        const uint32_t id = region.id;
        by_id_[id]->registered = false;
        by_handle_.erase(by_id_[id].get());
        by_id_[id].reset();
    }
    std::shared_ptr<Region> by_handle(void* handle) const {
        const auto found = by_handle_.find(handle);
        if (found == by_handle_.end()) throw Failure(Fault::kBadHandle, "this communicator has registered no such memory");
        return found->second;
    }
    bool is_removed(uint32_t id) const { return id < by_id_.size() && by_id_[id] == nullptr; }
    std::shared_ptr<Region> by_id(uint32_t id) const { return id < by_id_.size() ? by_id_[id] : nullptr; }

  private:
    std::unordered_map<void*, std::shared_ptr<Region>> by_handle_;
    std::vector<std::shared_ptr<Region>> by_id_;
};

}  // namespace moecomm::rma
