// Abstract Unix sockets (SOCK_SEQPACKET), the user at their other end, and messages that carry file descriptors.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "descriptor.h"

namespace moecomm::runtime {

Descriptor listen_at(const std::string& name);  // never blocks on accept; throws OsError
// Closed, with errno set, if it fails; EAGAIN: the other side has too many connections waiting, try later.
Descriptor connect_to(const std::string& name);
bool same_user(int connection);  // the process at the other end has our effective user id

bool send_descriptor(int connection, const void* message, size_t bytes, int fd);  // false with errno set if it fails

struct Received {
    ssize_t bytes = -1;
    bool truncated = false;  // more bytes or more descriptors than there was room for
    std::vector<Descriptor> descriptors;
};
Received receive_descriptors(int connection, void* message, size_t bytes);

}  // namespace moecomm::runtime
