// Every rank connected to every other: a control connection, which threads of NCCL's callers wait on, and a data connection, which
// nobody ever waits on.
#pragma once
#include <memory>
#include <vector>

#include "address.h"
#include "handshake.h"
#include "mailbox.h"

namespace moecomm::rma {

struct Channel {
    Route route = Route::kTcp;
    Descriptor control, data;
    std::unique_ptr<Mailbox> to, from;  // kLocal only
};

// By rank; our own place stays empty.  Throws Failure, naming the rank that did not come.
std::vector<Channel> connect_all(const Listener& listener, const std::vector<Address>& addresses, const Identity& identity,
                                 std::chrono::milliseconds timeout);

}  // namespace moecomm::rma
