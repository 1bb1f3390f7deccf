// Stream sockets that never block: within a host by abstract name, between hosts by IPv4 address.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "../runtime/descriptor.h"

namespace moecomm::rma {

using runtime::Descriptor;
using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

struct TcpPlace {
    uint32_t address = 0;  // both as in sockaddr_in
    uint16_t port = 0;     // 0: nowhere
};

Descriptor listen_local(const std::string& name);
Descriptor listen_tcp(const std::string& address, TcpPlace& place);  // "": of the first interface that is up, else 127.0.0.1
struct Accepted {
    Descriptor socket;      // closed: nobody is there now, or there is no room
    const char* no_room{};  // why this process, or the system, can't open another socket now; null: it can
};
Accepted accept_from(int listener);  // throws Failure(kSystem) for a listener that is broken
// Both wait for the other side to accept; throw Failure(kConnectFailed) at the deadline, or if there is nobody.
Descriptor connect_local(const std::string& name, Deadline deadline);
Descriptor connect_tcp(const TcpPlace& place, Deadline deadline);
void tune_tcp(int socket, std::chrono::milliseconds timeout);  // small messages leave at once; a dead host is noticed

bool wait_for(int socket, short events, Deadline deadline);  // poll; false: the deadline has passed
// All bytes, or Failure: kPeerLost if the other side is gone, kConnectFailed at the deadline, kSystem for a descriptor that can't be opened
// here.  At most one descriptor goes with them.
void send_all(int socket, const void* data, size_t bytes, Deadline deadline, int fd = -1);
std::vector<Descriptor> receive_all(int socket, void* data, size_t bytes, Deadline deadline);

// What is there now; -1: nothing (would block), 0: the other side has closed.  Throw Failure(kPeerLost) if the connection is broken.
long send_some(int socket, const void* data, size_t bytes, const void* more, size_t more_bytes);
long receive_some(int socket, void* data, size_t bytes);

void fill_random(void* data, size_t bytes);

}  // namespace moecomm::rma
