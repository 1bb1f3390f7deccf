#include "socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "failure.h"
#include "runtime/fd_socket.h"

namespace moecomm::rma {
namespace {

constexpr int kWaiting = 1024;
constexpr int kType = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;

[[noreturn]] void fail(Fault fault, const std::string& call) { throw Failure(fault, call + ": " + std::strerror(errno)); }

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

socklen_t local_address(const std::string& name, sockaddr_un& address) {
    address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));  // the leading 0 makes it abstract
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

sockaddr_in tcp_address(const TcpPlace& place) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = place.address;
    address.sin_port = place.port;
    return address;
}

uint32_t first_interface() {
    uint32_t found = htonl(INADDR_LOOPBACK);
    ifaddrs* all = nullptr;
    if (::getifaddrs(&all) != 0) return found;
    for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
        if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
        if ((one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_RUNNING) == 0) continue;
        found = reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr.s_addr;
        break;
    }
    ::freeifaddrs(all);
    return found;
}

Descriptor connect_to(int family, const sockaddr* address, socklen_t bytes, Deadline deadline) {
    for (;;) {
        Descriptor connection(::socket(family, kType, 0));
        if (!connection.open()) fail(Fault::kSystem, "socket");
        if (::connect(connection.get(), address, bytes) == 0) return connection;
        if (errno == EINPROGRESS) {
            if (!wait_for(connection.get(), POLLOUT, deadline)) throw Failure(Fault::kConnectFailed, "nobody answers");
            int error = 0;
            socklen_t size = sizeof error;
            ::getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &size);
            if (error == 0) return connection;
            errno = error;
        }
        if (errno != EAGAIN) fail(Fault::kConnectFailed, "connect");
        // The listener's queue is full: try again.
        if (Clock::now() >= deadline) throw Failure(Fault::kConnectFailed, "nobody answers");
        ::poll(nullptr, 0, 5);
    }
}

}  // namespace

Descriptor listen_local(const std::string& name) {
    sockaddr_un address;
    const socklen_t bytes = local_address(name, address);
    Descriptor listener(::socket(AF_UNIX, kType, 0));
    if (!listener.open()) fail(Fault::kSystem, "socket");
    if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) fail(Fault::kSystem, "bind");
    if (::listen(listener.get(), kWaiting) != 0) fail(Fault::kSystem, "listen");
    return listener;
}

Descriptor listen_tcp(const std::string& wanted, TcpPlace& place) {
    sockaddr_in address = tcp_address({first_interface(), 0});
    if (!wanted.empty() && ::inet_pton(AF_INET, wanted.c_str(), &address.sin_addr) != 1) {
        throw Failure(Fault::kUnsupported, "MOECOMM_RMA_ADDRESS=" + wanted + ": want an IPv4 address");
    }
    Descriptor listener(::socket(AF_INET, kType, 0));
    if (!listener.open()) fail(Fault::kSystem, "socket");
    if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) fail(Fault::kSystem, "bind");
    if (::listen(listener.get(), kWaiting) != 0) fail(Fault::kSystem, "listen");
    socklen_t bytes = sizeof address;
    if (::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0) fail(Fault::kSystem, "getsockname");
    place = {address.sin_addr.s_addr, address.sin_port};
    return listener;
}

Accepted accept_from(int listener) {
    Accepted accepted{Descriptor(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK))};
    if (accepted.socket.open()) return accepted;
    switch (errno) {
        case EMFILE:
        case ENFILE:
        case ENOBUFS:
        case ENOMEM:
            accepted.no_room = std::strerror(errno);
            break;
        case EBADF:
        case EINVAL:
        case ENOTSOCK:
        case EOPNOTSUPP:
            fail(Fault::kSystem, "accept");
        default:  // no connection, or one that has ended already, with its error
            break;
    }
    return accepted;
}

Descriptor connect_local(const std::string& name, Deadline deadline) {
    sockaddr_un address;
    const socklen_t bytes = local_address(name, address);
    return connect_to(AF_UNIX, reinterpret_cast<sockaddr*>(&address), bytes, deadline);
}

Descriptor connect_tcp(const TcpPlace& place, Deadline deadline) {
    const sockaddr_in address = tcp_address(place);
    return connect_to(AF_INET, reinterpret_cast<const sockaddr*>(&address), sizeof address, deadline);
}

void tune_tcp(int socket, std::chrono::milliseconds timeout) {
    const int on = 1;
    const auto patience = static_cast<unsigned>(timeout.count());
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience, sizeof patience);
}

bool wait_for(int socket, short events, Deadline deadline) {
    for (;;) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
        if (left <= 0) return false;
        pollfd one{socket, events, 0};
        if (::poll(&one, 1, static_cast<int>(std::min<long>(left, 1000))) > 0) return true;
    }
}

void send_all(int socket, const void* data, size_t bytes, Deadline deadline, int fd) {
    const auto* from = static_cast<const char*>(data);
    if (fd >= 0) {
        if (!runtime::send_descriptor(socket, data, bytes, fd)) fail(Fault::kPeerLost, "sendmsg");
        return;  // the record is far smaller than the buffer of a new socket
    }
    while (bytes > 0) {
        const ssize_t sent = ::send(socket, from, bytes, MSG_NOSIGNAL);
        if (sent < 0 && !would_block()) fail(Fault::kPeerLost, "send");
        if (sent < 0 && !wait_for(socket, POLLOUT, deadline)) throw Failure(Fault::kConnectFailed, "nothing is taken");
        if (sent > 0) from += sent, bytes -= static_cast<size_t>(sent);
    }
}

std::vector<Descriptor> receive_all(int socket, void* data, size_t bytes, Deadline deadline) {
    auto* to = static_cast<char*>(data);
    std::vector<Descriptor> came;
    while (bytes > 0) {
        runtime::Received part = runtime::receive_descriptors(socket, to, bytes);
        if (part.bytes == 0) throw Failure(Fault::kPeerLost, "the connection was closed");
        if (part.bytes < 0 && !would_block()) fail(Fault::kPeerLost, "recvmsg");
        if (part.bytes < 0 && !wait_for(socket, POLLIN, deadline)) throw Failure(Fault::kConnectFailed, "nothing came");
        if (part.truncated) throw Failure(Fault::kSystem, "a descriptor came, and this process can open no more of them");
        for (Descriptor& fd : part.descriptors) came.push_back(std::move(fd));
        if (part.bytes > 0) to += part.bytes, bytes -= static_cast<size_t>(part.bytes);
    }
    return came;
}

long send_some(int socket, const void* data, size_t bytes, const void* more, size_t more_bytes) {
    iovec parts[2] = {{const_cast<void*>(data), bytes}, {const_cast<void*>(more), more_bytes}};
    msghdr message{};
    message.msg_iov = bytes > 0 ? parts : parts + 1;
    message.msg_iovlen = bytes > 0 && more_bytes > 0 ? 2 : 1;
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent >= 0) return sent;
    if (would_block()) return -1;
    fail(Fault::kPeerLost, "send");
}

long receive_some(int socket, void* data, size_t bytes) {
    const ssize_t got = ::recv(socket, data, bytes, 0);
    if (got >= 0) return got;
    if (would_block()) return -1;
    fail(Fault::kPeerLost, "recv");
}

void fill_random(void* data, size_t bytes) {
    if (::getrandom(data, bytes, 0) != static_cast<ssize_t>(bytes)) fail(Fault::kSystem, "getrandom");
}

}  // namespace moecomm::rma
