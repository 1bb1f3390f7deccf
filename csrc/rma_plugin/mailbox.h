// Signals to another process of this host: a ring in shared memory, written by one rank and read by one.
// The reader makes it and trusts nothing in it; the writer checks that its size can't be changed any more before it maps it.
#pragma once
#include <cstdint>

#include "../runtime/descriptor.h"

namespace moecomm::rma {

using runtime::Descriptor;

struct Mail {
    uint64_t at, value;
    uint32_t region;
    uint32_t place;  // the low bits of its place in the stream of mail
};
static_assert(sizeof(Mail) == 24, "shared between processes");

class Mailbox {
  public:
    static constexpr uint64_t kPlaces = 1024;

    Mailbox() = default;
    ~Mailbox();
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;

    Descriptor create();  // to be given to the writer
    void open(int fd);    // throws Failure(kPeerLied)

    bool post(const Mail& mail, int reader);  // false: full
    bool take(Mail& mail, int writer);        // false: empty
                                              // Both throw Failure(kPeerLied) if the other side's count is impossible.

  private:
    struct Shared;
    void map(int fd);

    Shared* shared_ = nullptr;
    uint64_t place_ = 0;  // how many we have posted, or taken
};

}  // namespace moecomm::rma
