#include "world.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace {

std::mutex log_mutex;
std::string log_text;

}  // namespace

void give_up(const std::string& why) {
    std::fprintf(stderr, "FAILED: %s\n", why.c_str());
    std::fflush(stderr);
    ::_exit(1);
}

void require(bool fact, const std::string& what) {
    if (!fact) give_up(what);
}

const std::string& logged() {
    const std::lock_guard<std::mutex> lock(log_mutex);
    static thread_local std::string copy;
    copy = log_text;
    return copy;
}

void log_line(int, unsigned long, const char*, int, const char* format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    const std::lock_guard<std::mutex> lock(log_mutex);
    log_text += std::string(line) + "\n";
}

bool names(const std::string& one) {
    const bool found = logged().find(one) != std::string::npos;
    if (!found) std::fprintf(stderr, "wanted %s, got: %s\n", one.c_str(), logged().c_str());
    return found;
}

World::World(const Options& options) : options_(options) {
    void* at = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(at != MAP_FAILED, "mmap");
    shared_ = new (at) Shared();
}

bool World::run(const std::function<bool(int)>& body, int expected_to_die) {
    ::alarm(static_cast<unsigned>(options_.seconds));  // whatever hangs ends here
    if (options_.mode == "threads") {
        std::vector<std::thread> threads;
        std::atomic<int> good{0};
        for (int rank = 0; rank < options_.ranks; ++rank) {
            threads.emplace_back([&, rank] {
                fake_context(true);
                good += body(rank) ? 1 : 0;
            });
        }
        for (auto& thread : threads) thread.join();
        return good == options_.ranks;
    }
    std::vector<pid_t> children;
    for (int rank = 0; rank < options_.ranks; ++rank) {
        const pid_t child = ::fork();
        require(child >= 0, "fork");
        if (child == 0) {
            ::alarm(static_cast<unsigned>(options_.seconds));
            fake_context(true);
            const bool good = body(rank);
            std::fflush(stdout);
            ::_exit(good ? 0 : 1);
        }
        children.push_back(child);
    }
    bool good = true;
    for (int rank = 0; rank < options_.ranks; ++rank) {
        int status = 0;
        ::waitpid(children[rank], &status, 0);
        const bool died = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && rank == expected_to_die;
        if (died || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
        std::fprintf(stderr, "rank %d ended with status %#x\n", rank, status);
        good = false;
    }
    return good;
}

void World::barrier() {
    const int turn = shared_->turn.load();
    if (shared_->arrived.fetch_add(1) + 1 == options_.ranks) {
        shared_->arrived.store(0);
        shared_->turn.fetch_add(1);
        return;
    }
    while (shared_->turn.load() == turn) std::this_thread::sleep_for(std::chrono::microseconds(100));  // the alarm ends it
}

char* allocate_window(size_t bytes) {
    char* memory = fake_allocate(bytes, true);
    std::memset(memory, kUntouched, bytes);
    return memory;
}

char* allocate_signals(size_t bytes) { return fake_allocate(bytes, false); }
