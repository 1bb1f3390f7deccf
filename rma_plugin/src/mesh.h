// Connections of every rank to every other: a control connection, on which threads of NCCL's callers wait, and a data connection, on which
// no thread waits.
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

// Connect all ranks. Return the channels by rank; this rank's own stays empty. Throws Failure, naming the rank that did not connect.
std::vector<Channel> connect_all(const Listener& listener, const std::vector<Address>& addresses, const Identity& identity,
                                 std::chrono::milliseconds timeout);

}  // namespace moecomm::rma
