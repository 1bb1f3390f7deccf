#include "rank_threads.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "../host/during_waits.h"

namespace moecomm::runtime {
namespace {

struct Threads {
    std::vector<std::thread> all;
    ~Threads() { join(); }
    void join() {
        for (std::thread& thread : all)
            if (thread.joinable()) thread.join();
    }
};

}  // namespace

void run_on_threads(const std::vector<std::function<void()>>& jobs) {
    std::vector<std::exception_ptr> thrown(jobs.size());
    const auto run = [&](size_t i) {
        try {
            jobs[i]();
        } catch (...) {
            thrown[i] = std::current_exception();
        }
    };
    std::mutex mutex;
    std::condition_variable ended;
    size_t running = 0;
    Threads threads;
    for (size_t i = 0; i + 1 < jobs.size(); ++i) {
        {
            std::lock_guard lock(mutex);
            ++running;
        }
        threads.all.push_back(host::background_thread([&, i] {
            run(i);
            std::lock_guard lock(mutex);
            --running;
            ended.notify_all();
        }));
    }
    if (!jobs.empty()) run(jobs.size() - 1);
    const auto all_ended = [&] {
        std::unique_lock lock(mutex);
        return ended.wait_for(lock, std::chrono::nanoseconds(host::kLookNs), [&] { return running == 0; });
    };
    while (!all_ended()) host::DuringWaits::look();
    threads.join();
    for (const std::exception_ptr& error : thrown)
        if (error) std::rethrow_exception(error);
}

}  // namespace moecomm::runtime
