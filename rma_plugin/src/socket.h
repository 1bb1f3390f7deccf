// Messages over non-blocking sockets of one host (csrc/runtime/fd_socket.h): each comes whole, with at most one descriptor.
#pragma once
#include <chrono>
#include <string>

#include "runtime/descriptor.h"

namespace moecomm::rma {

using runtime::Descriptor;
using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Connect to the listener of this name. Throws Failure(kConnectFailed) at the deadline or if nobody listens.
Descriptor connect_to(const std::string& name, Deadline deadline);
// Both throw Failure: kPeerLost if the other side is gone, kConnectFailed at the deadline. receive_message also throws kPeerLied for a
// message of another length, and kSystem if a descriptor cannot be opened here; it returns that descriptor, closed if none came.
void send_message(int socket, const void* data, size_t bytes, Deadline deadline, int fd = -1);
Descriptor receive_message(int socket, void* data, size_t bytes, Deadline deadline);

void fill_random(void* data, size_t bytes);

}  // namespace moecomm::rma
