// The window of a CPU rank: anonymous shared memory without a name.  It goes when the last process that maps it goes, and because its
// size is sealed no peer can truncate it under our feet (which would be a SIGBUS here).
#pragma once
#include "../protocol/compiler.h"
#include "descriptor.h"

namespace moecomm::runtime {

class HostWindow {
  public:
    // Zeroed memory of `bytes` > 0.  Throws std::invalid_argument, OsError.
    explicit HostWindow(u64 bytes);
    // A peer's window.  Takes `fd`, also when it throws: std::invalid_argument if the seals or the size are not those of a window of
    // `bytes`, OsError if it cannot be mapped.
    HostWindow(Descriptor fd, u64 bytes);
    HostWindow(const HostWindow&) = delete;
    HostWindow& operator=(const HostWindow&) = delete;
    ~HostWindow() { close(); }

    int fd() const { return fd_.get(); }  // -1 once closed
    u64 address() const { return address_; }
    u64 bytes() const { return bytes_; }
    // Unmaps.  The caller sees to it that nobody in this process still uses the memory.  May be called again.
    void close();

  private:
    void map();

    Descriptor fd_;
    u64 bytes_;
    u64 address_ = 0;
};

}  // namespace moecomm::runtime
