// The threads of one rank in one round.  A team of one is the caller alone and costs nothing.
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
    // Starts workers - 1 threads, or as many as the system gives.
    explicit Team(i32 workers);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    i32 size() const { return static_cast<i32>(threads_.size()) + 1; }

    // Calls work(worker) for every worker 0 .. size() - 1 at once, 0 on the caller; returns when all are done.
    // What a worker wrote is visible to all workers of the next run.
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
    u32 runs_ = 0;  // how many have been asked for
    i32 busy_ = 0;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace moecomm::host
