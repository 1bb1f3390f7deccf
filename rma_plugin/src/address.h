// Address that a rank publishes through NCCL, and the socket at which it listens.
#pragma once
#include <cstdint>

#include "socket.h"

namespace moecomm::rma {

struct Address {
    uint32_t magic;
    uint32_t version;        // of all that ranks send each other
    char boot[40];           // the kernel's boot id, which identifies the host
    uint64_t net_namespace;  // abstract socket names are local to a namespace
    char name[40];           // of the socket: 32 hexadecimal digits and a 0
    uint8_t token[16];       // a rank that connects repeats it, so that no other process is taken for a rank
    uint8_t pad[16];
};
static_assert(sizeof(Address) == 128, "NCCL carries 128 bytes");

struct Listener {
    Address address;
    Descriptor socket;
};

Listener listen_here();
// Throw Failure(kNotReachable), with the reason, unless rank `their_rank` is on this host and has this version of the plugin.
void check_reachable(const Address& mine, const Address& theirs, int their_rank);

}  // namespace moecomm::rma
