// Mailbox: signals to another process of this host, in a ring in shared memory with one writer and one reader.
// The reader creates the ring and validates everything it reads. The writer checks that the ring's size is sealed before mapping it.
#pragma once
#include <cstdint>

#include "runtime/descriptor.h"

namespace moecomm::rma {

using runtime::Descriptor;

struct Mail {
    uint64_t at, value;
    uint32_t region;
    uint32_t place;  // low bits of its index in the stream of signals
};
static_assert(sizeof(Mail) == 24, "shared between processes");

class Mailbox {
  public:
    static constexpr uint64_t kPlaces = 1024;

    Mailbox() = default;
    ~Mailbox();
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;

    Descriptor create();  // returns the descriptor for the writer
    void open(int fd);    // throws Failure(kPeerLied)

    // Both throw Failure(kPeerLied) if the other side's count is impossible.
    bool post(const Mail& mail, int reader);  // false: full
    bool take(Mail& mail, int writer);        // false: empty

    void leave();       // the writer: no mail follows, in good order
    bool left() const;  // the reader: the writer has left; all its mail is there

  private:
    struct Shared;
    void map(int fd);

    Shared* shared_ = nullptr;
    uint64_t place_ = 0;  // signals posted or taken by this side
};

}  // namespace moecomm::rma
