// Detects the death of a peer's process and sets the abort words, so that waits end before the deadline.
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
    // Watch pids[r] for every rank r whose pid is positive and not this process.  On a death, set each of `abort_words` (u32*) that is 0 to
    // abort_word(peer_lost, r), unless left_words[r] (u32*; 0 or absent: none) is set, because that rank has announced that it leaves.
    // All words must live until close().  `pidfds` false: poll the processes every 100 ms, as on kernels without pidfds.  `passed`: by
    // rank, a pidfd that the peer opened of itself, or a closed descriptor.  It takes precedence over the pid and works across PID
    // namespaces, where a pid means another process or none.
    Watcher(const std::vector<int>& pids, int own_rank, std::vector<u64> abort_words, std::vector<u64> left_words = {}, bool pidfds = true,
            std::vector<Descriptor> passed = {});
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;
    ~Watcher() { close(); }

    // From now on, report or ignore the end of a peer's process.  dead() names it in both cases.
    void ignore(int rank, bool ignored);
    std::vector<int> dead() const;  // ranks, in the order of detection
    void close();                   // joins the thread; idempotent

  private:
    struct Peer {
        int rank;
        int pid;
        Descriptor pidfd;  // closed: poll the pid instead
    };

    void watch();
    bool wait();  // wait until something may have changed; false when closing
    bool left(int rank) const;
    void report(const Peer& peer);

    const int owner_;  // id of the process that runs the thread; a forked child does not run it
    const std::vector<u64> abort_words_, left_words_;
    std::vector<Peer> peers_;  // peers not found dead; only the thread accesses it
    Descriptor wake_;
    mutable std::mutex mutex_;
    std::vector<int> dead_;
    std::vector<bool> ignored_;  // by rank
    std::mutex closing_;
    std::thread thread_;
};

}  // namespace moecomm::runtime
