#include "address.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstring>

#include "failure.h"
#include "handshake.h"

namespace moecomm::rma {
namespace {

constexpr uint32_t kMagic = 0x6d72616d;

void read_boot_id(char* to, size_t bytes) {
    const Descriptor file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    const ssize_t got = file.open() ? ::read(file.get(), to, bytes - 1) : -1;
    if (got <= 0) fill_random(to, bytes - 1);  // unknown: equal to no other rank's
    to[bytes - 1] = 0;
}

}  // namespace

Listener listen_everywhere(const Settings& settings) {
    Listener listener{};
    Address& address = listener.address;
    address.magic = kMagic;
    address.version = kProtocolVersion;
    read_boot_id(address.boot, sizeof address.boot);
    struct stat status{};
    if (::stat("/proc/self/ns/net", &status) == 0) address.net_namespace = status.st_ino;
    uint8_t random[16];
    fill_random(random, sizeof random);
    for (int i = 0; i < 16; ++i) std::snprintf(address.name + 2 * i, 3, "%02x", random[i]);
    if (settings.way != Way::kTcp) {
        listener.local = listen_local(address.name);
        address.local = 1;
    }
    // Without a secret, any process could write to this rank's memory, so tcp does not listen.
    if (settings.way != Way::kLoopback && !settings.secret.empty()) {
        TcpPlace place;
        listener.tcp = listen_tcp(settings.address, place);
        address.tcp_address = place.address;
        address.tcp_port = place.port;
    }
    if (settings.way == Way::kTcp && settings.secret.empty()) {
        throw Failure(Fault::kNotReachable, "MOECOMM_RMA=tcp wants MOECOMM_JOB_SECRET, the same on all ranks");
    }
    return listener;
}

Route route_between(const Address& mine, const Address& theirs, int their_rank) {
    const std::string who = rank_name(their_rank);
    if (theirs.magic != kMagic || theirs.version != kProtocolVersion) {
        throw Failure(Fault::kNotReachable, who + " has another version of this plugin, or none");
    }
    const bool one_host = std::memcmp(mine.boot, theirs.boot, sizeof mine.boot) == 0 && mine.net_namespace == theirs.net_namespace;
    if (one_host && mine.local == 1 && theirs.local == 1) return Route::kLocal;
    if (mine.tcp_port != 0 && theirs.tcp_port != 0) return Route::kTcp;
    if (!one_host) {
        throw Failure(Fault::kNotReachable, who +
                                                " is on another host, or in another network namespace: that is tcp, which wants "
                                                "MOECOMM_JOB_SECRET, the same on all ranks, and MOECOMM_RMA unset, auto or tcp");
    }
    throw Failure(Fault::kNotReachable, who + " has another MOECOMM_RMA");
}

}  // namespace moecomm::rma
