#include "socket.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "failure.h"
#include "runtime/fd_socket.h"

namespace moecomm::rma {
namespace {

[[noreturn]] void fail(Fault fault, const std::string& call) { throw Failure(fault, call + ": " + std::strerror(errno)); }

// Wait until a call that has just failed is worth another try; throw if it is not, or at the deadline.
void wait_for(int socket, short events, Deadline deadline, const char* call, const char* late) {
    if (errno != EAGAIN && errno != EINTR) fail(Fault::kPeerLost, call);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) throw Failure(Fault::kConnectFailed, late);
    pollfd one{socket, events, 0};
    ::poll(&one, 1, static_cast<int>(std::min<long>(left, 1000)));
}

}  // namespace

Descriptor connect_to(const std::string& name, Deadline deadline) {
    for (;;) {
        Descriptor connection = runtime::connect_to(name);
        if (connection.open()) return connection;
        if (errno != EAGAIN) fail(Fault::kConnectFailed, "connect");
        if (Clock::now() >= deadline) throw Failure(Fault::kConnectFailed, "nobody answers");
        ::poll(nullptr, 0, 5);  // the listener's queue is full
    }
}

void send_message(int socket, const void* data, size_t bytes, Deadline deadline, int fd) {
    const auto send = [&] {
        return fd >= 0 ? runtime::send_descriptor(socket, data, bytes, fd) : ::send(socket, data, bytes, MSG_NOSIGNAL) >= 0;
    };
    while (!send()) wait_for(socket, POLLOUT, deadline, "send", "nothing is taken");
}

Descriptor receive_message(int socket, void* data, size_t bytes, Deadline deadline) {
    for (;;) {
        runtime::Received message = runtime::receive_descriptors(socket, data, bytes);
        if (message.bytes < 0) {
            wait_for(socket, POLLIN, deadline, "receive", "nothing came");
            continue;
        }
        if (message.bytes == 0) throw Failure(Fault::kPeerLost, "the connection was closed");
        if (message.bytes != static_cast<ssize_t>(bytes)) throw Failure(Fault::kPeerLied, "a message has another length");
        if (message.truncated) throw Failure(Fault::kSystem, "a descriptor came, and this process can open no more of them");
        return message.descriptors.empty() ? Descriptor() : std::move(message.descriptors.front());
    }
}

void fill_random(void* data, size_t bytes) {
    if (::getrandom(data, bytes, 0) != static_cast<ssize_t>(bytes)) fail(Fault::kSystem, "getrandom");
}

}  // namespace moecomm::rma
