// What a rank publishes through NCCL, and what two ranks conclude from each other's: how they reach each other.
#pragma once
#include <cstdint>

#include "settings.h"
#include "socket.h"

namespace moecomm::rma {

struct Address {
    uint32_t magic;
    uint32_t version;
    char boot[40];           // the kernel's boot id: the same on one host
    uint64_t net_namespace;  // abstract names are known within one
    uint32_t tcp_address;
    uint16_t tcp_port;  // 0: does not listen there
    uint8_t local;      // 1: listens at `name`
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
Route route_between(const Address& mine, const Address& theirs, int their_rank);  // throws Failure(kNotReachable), saying why

}  // namespace moecomm::rma
