// The window of a CPU rank: anonymous shared memory (memfd).  It is freed when the last process that maps it exits.  Its size is sealed, so
// that no peer can truncate it, which would raise SIGBUS here.
#pragma once
#include "../protocol/compiler.h"
#include "descriptor.h"

namespace moecomm::runtime {

class HostWindow {
  public:
    // Create zeroed memory of `bytes` > 0.  Throws std::invalid_argument, OsError.
    explicit HostWindow(u64 bytes);
    // Map a peer's window.  Takes ownership of `fd`, also on failure.  Throws std::invalid_argument if the seals or the size are not those
    // of a window of `bytes`, OsError if it cannot be mapped.
    HostWindow(Descriptor fd, u64 bytes);
    HostWindow(const HostWindow&) = delete;
    HostWindow& operator=(const HostWindow&) = delete;
    ~HostWindow() { close(); }

    int fd() const { return fd_.get(); }  // -1 once closed
    u64 address() const { return address_; }
    u64 bytes() const { return bytes_; }
    // Give the memory from offset `from` on back to the system, in whole pages: it reads as zeros, for every process, and takes memory
    // again where it is written.  All mappings stay.  Returns the bytes before it.  Throws std::invalid_argument, OsError.
    u64 release(u64 from);
    // Unmap.  The caller ensures that no thread of this process still uses the memory.  Idempotent.
    void close();

  private:
    void map();

    Descriptor fd_;
    u64 bytes_;
    u64 address_ = 0;
};

}  // namespace moecomm::runtime
