#include "fd_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "error.h"

namespace moecomm::runtime {
namespace {

constexpr int kType = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;
constexpr int kWaiting = 1024;  // backlog of listen()
constexpr int kMaxReceived = 4;

struct Address {
    sockaddr_un socket{};
    socklen_t bytes;

    explicit Address(const std::string& name) {
        if (name.empty() || name.size() > 64) throw std::invalid_argument("an address has 1 to 64 bytes");
        socket.sun_family = AF_UNIX;
        std::memcpy(socket.sun_path + 1, name.data(), name.size());  // the leading 0 makes it abstract
        bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&socket); }
};

}  // namespace

Descriptor listen_at(const std::string& name) {
    const Address address(name);
    Descriptor listener(::socket(AF_UNIX, kType, 0));
    if (!listener.open()) throw_errno("socket");
    if (::bind(listener.get(), address.get(), address.bytes) != 0) throw_errno("bind");
    if (::listen(listener.get(), kWaiting) != 0) throw_errno("listen");
    return listener;
}

Descriptor connect_to(const std::string& name) {
    const Address address(name);
    Descriptor connection(::socket(AF_UNIX, kType, 0));
    if (!connection.open()) return connection;
    if (::connect(connection.get(), address.get(), address.bytes) == 0) return connection;
    const int number = errno;
    connection.reset();
    errno = number;
    return connection;
}

bool same_user(int connection) {
    ucred peer{};
    socklen_t bytes = sizeof peer;
    return ::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && bytes == sizeof peer && peer.uid == ::geteuid();
}

bool send_descriptor(int connection, const void* message, size_t bytes, int fd) {
    iovec body{const_cast<void*>(message), bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
    msghdr header{};
    header.msg_iov = &body;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    return ::sendmsg(connection, &header, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

Received receive_descriptors(int connection, void* message, size_t bytes) {
    iovec body{message, bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxReceived * sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &body;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    Received received;
    received.bytes = ::recvmsg(connection, &header, MSG_CMSG_CLOEXEC);
    if (received.bytes < 0) return received;
    received.truncated = (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
    for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
        const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; ++i) {
            int fd;
            std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
            received.descriptors.emplace_back(fd);
        }
    }
    return received;
}

}  // namespace moecomm::runtime
