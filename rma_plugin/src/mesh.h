// Connections of every rank to every other. Threads of NCCL's callers wait on them; NCCL's own thread only looks whether they are open.
#pragma once
#include <memory>
#include <vector>

#include "address.h"
#include "mailbox.h"

namespace moecomm::rma {

struct Hello {  // the first message of a rank that connects
    uint32_t magic;
    int32_t from;
    uint8_t token[16];  // of the address that it connects to
};
static_assert(sizeof(Hello) == 24, "sent as it is");
constexpr uint32_t kHelloMagic = 0x6d726168;

struct Channel {
    Descriptor socket;
    std::unique_ptr<Mailbox> to, from;
};

// Connect all ranks. Return the channels by rank; this rank's own stays empty. Throws Failure, naming the rank that did not connect.
std::vector<Channel> connect_all(const Listener& listener, const std::vector<Address>& addresses, int me, Deadline deadline);

}  // namespace moecomm::rma
