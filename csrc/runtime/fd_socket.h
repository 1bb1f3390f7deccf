// Abstract Unix sockets (SOCK_SEQPACKET), the check of the peer's user, and messages that carry file descriptors.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "descriptor.h"

namespace moecomm::runtime {

Descriptor listen_at(const std::string& name);  // never blocks on accept; throws OsError
// Return a closed descriptor and set errno on failure; EAGAIN means that the peer's backlog is full: try again later.
Descriptor connect_to(const std::string& name);
bool same_user(int connection);  // the process at the other end has our effective user id

bool send_descriptor(int connection, const void* message, size_t bytes, int fd);  // false and errno set on failure

struct Received {
    ssize_t bytes = -1;
    bool truncated = false;  // the message had more bytes or descriptors than fit
    std::vector<Descriptor> descriptors;
};
Received receive_descriptors(int connection, void* message, size_t bytes);

}  // namespace moecomm::runtime
