#include "world.h"

#include <dlfcn.h>
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

struct CudaProperties {
    int type, handle_types, location_type, location_id;
    void* metadata;
    uint64_t flags;
};

template <class Function>
Function cuda(const char* name) {
    static void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    require(library != nullptr, "no libcuda.so.1");
    return reinterpret_cast<Function>(::dlsym(library, name));
}

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
            threads.emplace_back([&, rank] { good += body(rank) ? 1 : 0; });
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

void World::barrier(int ranks) {
    const int all = ranks == 0 ? options_.ranks : ranks;
    const int turn = shared_->turn.load();
    if (shared_->arrived.fetch_add(1) + 1 == all) {
        shared_->arrived.store(0);
        shared_->turn.fetch_add(1);
        return;
    }
    while (shared_->turn.load() == turn) std::this_thread::sleep_for(std::chrono::microseconds(100));  // the alarm ends it
}

void use_cuda_on_this_thread(const Options& options) {
    static int context;
    if (options.cuda()) cuda<int (*)(void*)>("cuCtxSetCurrent")(&context);
}

AsNcclThread::AsNcclThread(const Options& options) : cuda_(options.cuda()) {
    if (cuda_) cuda<void (*)(bool)>("fake_nccl_thread")(true);
}

AsNcclThread::~AsNcclThread() {
    if (cuda_) cuda<void (*)(bool)>("fake_nccl_thread")(false);
}

void hold_copies(bool hold) { cuda<void (*)(bool)>("fake_hold_copies")(hold); }

int open_copies() { return cuda<int (*)()>("fake_open_copies")(); }

int mapped_windows() { return cuda<int (*)()>("fake_mapped_windows")(); }

char* allocate(const Options& options, size_t bytes, Sharing sharing) {
    const size_t whole = (bytes + 4095) / 4096 * 4096;
    char* memory;
    if (options.cuda()) {
        unsigned long long handle = 0, at = 0;
        const CudaProperties properties{1, sharing == Sharing::kWindow ? 1 : 0, 1, 0, nullptr, 0};
        require(cuda<int (*)(unsigned long long*, size_t, const CudaProperties*, unsigned long long)>("cuMemCreate")(&handle, whole,
                                                                                                                     &properties, 0) == 0,
                "cuMemCreate");
        cuda<int (*)(unsigned long long*, size_t, size_t, unsigned long long, unsigned long long)>("cuMemAddressReserve")(&at, whole, 0, 0,
                                                                                                                          0);
        cuda<int (*)(unsigned long long, size_t, size_t, unsigned long long, unsigned long long)>("cuMemMap")(at, whole, 0, handle, 0);
        cuda<int (*)(unsigned long long, size_t, const void*, size_t)>("cuMemSetAccess")(at, whole, nullptr, 1);
        memory = reinterpret_cast<char*>(at);
    } else {
        memory = static_cast<char*>(std::aligned_alloc(4096, whole));
    }
    std::memset(memory, sharing == Sharing::kPrivate ? 0 : kUntouched, whole);
    return memory;
}
