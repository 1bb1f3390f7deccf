#include "together.h"

#include <exception>
#include <thread>

#include "quiet_thread.h"

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

void run_together(const std::vector<std::function<void()>>& jobs) {
    std::vector<std::exception_ptr> thrown(jobs.size());
    const auto run = [&](size_t i) {
        try {
            jobs[i]();
        } catch (...) {
            thrown[i] = std::current_exception();
        }
    };
    Threads threads;
    for (size_t i = 0; i + 1 < jobs.size(); ++i) threads.all.push_back(quiet_thread([&run, i] { run(i); }));
    if (!jobs.empty()) run(jobs.size() - 1);
    threads.join();
    for (const std::exception_ptr& error : thrown)
        if (error) std::rethrow_exception(error);
}

}  // namespace moecomm::runtime
