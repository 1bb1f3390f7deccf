// Address that a rank publishes through NCCL, and the route that two ranks derive from their addresses.
#pragma once
#include <cstdint>

#include "settings.h"
#include "socket.h"

namespace moecomm::rma {

struct Address {
    uint32_t magic;
    uint32_t version;
    char boot[40];           // the kernel's boot id, which identifies the host
    uint64_t net_namespace;  // abstract socket names are local to a namespace
    uint32_t tcp_address;
    uint16_t tcp_port;  // 0: not listening
    uint8_t local;      // 1: listening at `name`
    uint8_t pad;
    char name[33];  // 32 hexadecimal digits
    char rest[31];
};
static_assert(sizeof(Address) == 128, "NCCL carries 128 bytes");

struct Listener {
    Address address;
    Descriptor local, tcp;
};

Listener listen_everywhere(const Settings& settings);

enum class Route { kLocal, kTcp };
Route route_between(const Address& mine, const Address& theirs, int their_rank);  // throws Failure(kNotReachable) with the reason

}  // namespace moecomm::rma
