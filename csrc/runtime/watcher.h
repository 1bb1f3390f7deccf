// Notices that the process of a peer has died, and says so in the abort words, so that nobody waits for it until the deadline.
#pragma once
#include <mutex>
#include <thread>
#include <vector>

#include "../protocol/compiler.h"
#include "descriptor.h"

namespace moecomm::runtime {

Descriptor pidfd_open(int pid);  // readable once the process has ended; throws OsError

class Watcher {
  public:
    // Watches pids[r] for every rank r whose pid is positive and not our own.  On a death each of `abort_words` (u32*) that is 0
    // becomes abort_word(peer_lost, r), unless left_words[r] (u32*, 0 or absent: none) is not 0 by then: that rank had said that it
    // leaves.  All words must live until close().  `pidfds` false: look at the processes every 100 ms instead, as is done where the
    // kernel has no pidfds.  `passed`: descriptors by rank, closed: none, that peers opened of themselves.  They work across PID
    // namespaces, where a pid is that of another process or of none; a rank that has passed one is watched by it, whatever its pid.
    Watcher(const std::vector<int>& pids, int own_rank, std::vector<u64> abort_words, std::vector<u64> left_words = {}, bool pidfds = true,
            std::vector<Descriptor> passed = {});
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;
    ~Watcher() { close(); }

    std::vector<int> dead() const;  // ranks, in the order in which they were found
    void close();                   // joins; may be called again

  private:
    struct Peer {
        int rank;
        int pid;
        Descriptor pidfd;  // closed: ask for the process instead
    };

    void watch();
    bool wait();  // until something may have changed; false when closing
    bool left(int rank) const;
    void report(const Peer& peer);

    const int owner_;  // the process that has the thread: a forked child has not
    const std::vector<u64> abort_words_, left_words_;
    std::vector<Peer> peers_;  // those not found dead yet; only the thread touches it
    Descriptor wake_;
    mutable std::mutex mutex_;
    std::vector<int> dead_;
    std::mutex closing_;
    std::thread thread_;
};

}  // namespace moecomm::runtime
