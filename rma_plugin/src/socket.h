// Non-blocking stream sockets: abstract Unix sockets within a host, IPv4 between hosts.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/descriptor.h"

namespace moecomm::rma {

using runtime::Descriptor;
using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

struct TcpPlace {
    uint32_t address = 0;  // both as in sockaddr_in
    uint16_t port = 0;     // 0: none
};

Descriptor listen_local(const std::string& name);
Descriptor listen_tcp(const std::string& address, TcpPlace& place);  // "": the first interface that is up, else 127.0.0.1
struct Accepted {
    Descriptor socket;      // closed: no connection is pending, or there is no room
    const char* no_room{};  // why the process or the system cannot open another socket now; null: it can
};
Accepted accept_from(int listener);  // throws Failure(kSystem) if the listener is broken
// Both wait until the other side accepts; throw Failure(kConnectFailed) at the deadline or if nobody listens.
Descriptor connect_local(const std::string& name, Deadline deadline);
Descriptor connect_tcp(const TcpPlace& place, Deadline deadline);
void tune_tcp(int socket, std::chrono::milliseconds timeout);  // small messages leave at once; a dead host is noticed

bool wait_for(int socket, short events, Deadline deadline);  // poll; false at the deadline
// Transfer all bytes, with at most one descriptor. Throw Failure: kPeerLost if the other side is gone, kConnectFailed at the deadline,
// kSystem if a received descriptor cannot be opened here.
void send_all(int socket, const void* data, size_t bytes, Deadline deadline, int fd = -1);
std::vector<Descriptor> receive_all(int socket, void* data, size_t bytes, Deadline deadline);

// Transfer what is possible now. Return -1 if it would block; receive_some returns 0 if the other side has closed. Throw Failure(kPeerLost)
// if the connection is broken.
long send_some(int socket, const void* data, size_t bytes, const void* more, size_t more_bytes);
long receive_some(int socket, void* data, size_t bytes);

void fill_random(void* data, size_t bytes);

}  // namespace moecomm::rma
