#include "team.h"

#include <chrono>
#include <system_error>

#include "during_waits.h"
#include "steps.h"

namespace moecomm::host {

Team::Team(i32 workers) {
    for (i32 worker = 1; worker < workers; ++worker) {
        try {
            threads_.emplace_back([this, worker] {
                this_worker() = worker;
                serve(worker);
            });
        } catch (const std::system_error&) {
            break;  // fewer threads do the same work
        }
    }
}

Team::~Team() {
    if (threads_.empty()) return;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Team::run_all(const std::function<void(i32)>& work) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        busy_ = static_cast<i32>(threads_.size());
        ++runs_;
    }
    changed_.notify_all();
    work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto done = [this] { return busy_ == 0; };
    if (!DuringWaits::any()) return changed_.wait(lock, done);
    while (!changed_.wait_for(lock, std::chrono::nanoseconds(kLookNs), done)) {
        lock.unlock();
        DuringWaits::look();
        lock.lock();
    }
}

void Team::serve(i32 worker) {
    for (u32 seen = 0;; ++seen) {
        const std::function<void(i32)>* work = nullptr;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return closing_ || runs_ != seen; });
            if (closing_) return;
            work = work_;
        }
        (*work)(worker);
        std::lock_guard<std::mutex> lock(mutex_);
        if (--busy_ == 0) changed_.notify_all();
    }
}

}  // namespace moecomm::host
