// Passes one file descriptor from every rank to every other rank of this host.
//
// Every rank listens on an abstract Unix socket of random name (there is no file that could stay behind) and sends its descriptor in
// one message to each peer.  Abstract sockets have no permission bits, so both ends check the other's user id (SO_PEERCRED), and a
// message counts only with the nonce of the job.  What is not from the job is closed and not answered: a stranger can be refused
// any number of times without making the exchange fail.
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

    // Listens at once, so that the address is good as soon as peers can know it.
    Exchange(int rank, int ranks, const Nonce& nonce);
    ~Exchange() { close(); }

    const std::string& address() const { return address_; }  // at most 64 bytes; tell it to the peers

    // Every rank calls it, the same number of times.  Returns the descriptor of every rank, the own entry closed; `fd` stays the
    // caller's.  Throws OsError: ETIMEDOUT naming the ranks that are missing, ECONNREFUSED if one is gone, EACCES if another user
    // holds its address, ECANCELED if closed meanwhile.
    std::vector<Descriptor> share(int fd, const std::vector<std::string>& addresses, double timeout_s, const Check& check);
    void close();  // ends a share() of another thread; may be called again

  private:
    struct Message;
    class Sharing;

    int rank_, ranks_;
    Nonce nonce_;
    std::string address_;
    Descriptor listener_;
    u32 sequence_ = 0;                     // shares begun
    std::vector<Descriptor> connections_;  // accepted, not yet read: maybe of the next share
    std::vector<Descriptor> early_;        // of the next share, from peers that have already finished this one
    std::mutex sharing_;
    std::atomic<bool> closing_{false};
};

}  // namespace moecomm::runtime
