// The threads of one rank in one round.  A team of one is the caller alone and starts no thread.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "../protocol/compiler.h"

namespace moecomm::host {

class Team {
  public:
    // Start workers - 1 threads, or fewer if the system refuses.
    explicit Team(i32 workers);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    i32 size() const { return static_cast<i32>(threads_.size()) + 1; }

    // Call work(worker) for every worker 0 .. size() - 1 concurrently, 0 on the caller; return when all are done.
    // All writes of a run are visible to all workers of the next.
    template <class Work>
    void run(const Work& work) {
        if (threads_.empty()) return work(0);
        run_all(work);
    }

  private:
    void run_all(const std::function<void(i32)>& work);
    void serve(i32 worker);

    std::mutex mutex_;
    std::condition_variable changed_;
    const std::function<void(i32)>* work_ = nullptr;
    u32 runs_ = 0;  // number of run_all() calls
    i32 busy_ = 0;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace moecomm::host
