#include "address.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstring>

#include "failure.h"
#include "runtime/fd_socket.h"

namespace moecomm::rma {
namespace {

constexpr uint32_t kMagic = 0x6d72616d, kVersion = 3;

void read_boot_id(char* to, size_t bytes) {
    const Descriptor file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    const ssize_t got = file.open() ? ::read(file.get(), to, bytes - 1) : -1;
    if (got <= 0) fill_random(to, bytes - 1);  // unknown: equal to no other rank's
    to[bytes - 1] = 0;
}

}  // namespace

Listener listen_here() {
    Listener listener{};
    Address& address = listener.address;
    address.magic = kMagic;
    address.version = kVersion;
    read_boot_id(address.boot, sizeof address.boot);
    struct stat status{};
    if (::stat("/proc/self/ns/net", &status) == 0) address.net_namespace = status.st_ino;
    uint8_t random[16];
    fill_random(random, sizeof random);
    for (int i = 0; i < 16; ++i) std::snprintf(address.name + 2 * i, 3, "%02x", random[i]);
    fill_random(address.token, sizeof address.token);
    listener.socket = runtime::listen_at(address.name);
    return listener;
}

void check_reachable(const Address& mine, const Address& theirs, int their_rank) {
    const std::string who = rank_name(their_rank);
    if (theirs.magic != kMagic || theirs.version != kVersion) {
        throw Failure(Fault::kNotReachable, who + " has another version of this plugin, or none");
    }
    if (std::memcmp(mine.boot, theirs.boot, sizeof mine.boot) == 0 && mine.net_namespace == theirs.net_namespace) return;
    throw Failure(Fault::kNotReachable, who + " is on another host, or in another network namespace: between those, GIN wants an RDMA NIC");
}

}  // namespace moecomm::rma
