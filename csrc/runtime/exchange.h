// Passes one file descriptor from every rank to every other rank of this host.
//
// Every rank listens on an abstract Unix socket of random name (there is no file that could stay behind) and sends its descriptor in
// one message to each peer.  Abstract sockets have no permission bits, so both ends check the other's user id (SO_PEERCRED), and a
// message is accepted only with the nonce of the job.  Any other connection is closed without an answer and does not make the exchange
// fail.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "../protocol/compiler.h"
#include "descriptor.h"

namespace moecomm::runtime {

class Exchange {
  public:
    using Nonce = std::array<u8, 16>;
    using Check = std::function<void()>;  // called at least every 50 ms of waiting; throws to give up

    // Listens at once, so that peers can connect as soon as they know the address.
    Exchange(int rank, int ranks, const Nonce& nonce);
    ~Exchange() { close(); }

    const std::string& address() const { return address_; }  // at most 64 bytes; send it to the peers

    // Send `fd` to every peer and return the descriptor of every rank; this rank's entry is closed (-1), and `fd` stays the caller's. Every
    // rank must call it the same number of times.  Throws OsError: ETIMEDOUT naming the missing ranks, ECONNREFUSED if a rank has exited,
    // EACCES if another user holds its address, ECANCELED if closed meanwhile.
    std::vector<Descriptor> share(int fd, const std::vector<std::string>& addresses, double timeout_s, const Check& check);
    void close();  // ends a share() in another thread; idempotent

  private:
    struct Message;
    class Sharing;

    int rank_, ranks_;
    Nonce nonce_;
    std::string address_;
    Descriptor listener_;
    u32 sequence_ = 0;                     // number of share() calls
    std::vector<Descriptor> connections_;  // accepted but not read; may belong to the next share()
    std::vector<Descriptor> early_;        // for the next share(), from peers that have finished this one
    std::mutex sharing_;
    std::atomic<bool> closing_{false};
};

}  // namespace moecomm::runtime
