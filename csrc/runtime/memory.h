// Zeroed memory of this process for data outside tensors: failure records, abort words, routes.
#pragma once
#include <cstdlib>
#include <cstring>
#include <new>

#include "../protocol/compiler.h"

namespace moecomm::runtime {

class HostMemory {
  public:
    static constexpr u64 kAlignment = 256;

    explicit HostMemory(u64 bytes) : bytes_(bytes) {
        const u64 room = align_up<u64>(bytes > 0 ? bytes : 1, kAlignment);
        at_ = bytes <= room ? std::aligned_alloc(kAlignment, room) : nullptr;
        if (at_ == nullptr) throw std::bad_alloc();
        std::memset(at_, 0, room);
    }
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;
    ~HostMemory() { std::free(at_); }

    u64 address() const { return reinterpret_cast<u64>(at_); }
    u64 bytes() const { return bytes_; }

  private:
    void* at_;
    u64 bytes_;
};

}  // namespace moecomm::runtime
