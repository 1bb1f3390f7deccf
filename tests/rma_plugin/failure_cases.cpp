// Peers that die, sleep, leave, do not come, or know another secret; and a caller who asks for nonsense.
#include <dlfcn.h>

#include <csignal>
#include <cstdlib>

#include "open.h"
#include "protocol/record.h"
#include "scenarios.h"

namespace {

// A word that kernels look at while they wait for a peer.
class Watching {
  public:
    explicit Watching(const Options& options)
        : library_(::dlopen(options.plugin.c_str(), RTLD_NOW)), secret_(std::getenv("MOECOMM_JOB_SECRET")) {
        require(function<Watch>("moecomm_rma_watch")(secret_.c_str(), &word_) == 0 && first() == "-1 ", "watch");
    }
    ~Watching() {
        function<Watch>("moecomm_rma_watch")(secret_.c_str(), nullptr);
        require(first() == "-1 ", "what nobody watches is forgotten");
    }
    Watching(const Watching&) = delete;
    Watching& operator=(const Watching&) = delete;

    bool quiet() const { return __atomic_load_n(&word_, __ATOMIC_RELAXED) == 0; }
    bool lost(int rank, const std::string& how) const {
        const bool told = __atomic_load_n(&word_, __ATOMIC_RELAXED) == moecomm::abort_word(moecomm::Failure::peer_lost, rank);
        const bool said = first().rfind(std::to_string(rank) + " " + how + ": ", 0) == 0;
        if (!told || !said)
            std::fprintf(stderr, "wanted the loss of rank %d, %s, got: %x, %s\n", rank, how.c_str(), word_, first().c_str());
        return told && said;
    }

  private:
    using Watch = int (*)(const char*, uint32_t*);
    using Loss = int (*)(const char*, int, char*, size_t);
    template <class Function>
    Function function(const char* name) const {
        return reinterpret_cast<Function>(::dlsym(library_, name));
    }
    std::string first() const {
        char text[200] = "";
        const int rank = function<Loss>("moecomm_rma_loss")(secret_.c_str(), 0, text, sizeof text);
        return std::to_string(rank) + " " + text;
    }

    void* const library_;
    const std::string secret_;
    uint32_t word_ = 0;
};

// Puts to rank 1 until the thread has failed; what it takes in the meantime is bounded by its queue.
bool put_until_failure(Open& open, uint64_t bytes) {
    const auto deadline = Clock::now() + kLong;
    while (open.proxy.result() == abi::kSuccess && Clock::now() < deadline) open.proxy.post(0, 1, open.put(bytes));
    return open.proxy.wait_result(kLong) && open.proxy.result() == abi::kRemoteError && open.proxy.last_error() &&
           open.proxy.longest_call() < kBlocked;
}

// Puts to rank 1 until a watcher has been told of its loss. Then puts to it end, and so do those to others.
bool put_until_lost(Open& open, const Watching& watching, uint64_t bytes, const std::vector<int>& others = {}) {
    const auto deadline = Clock::now() + kLong;
    while (watching.quiet() && Clock::now() < deadline) open.proxy.post(0, 1, open.put(bytes));
    for (int i = 0; i < 300; ++i) {
        open.proxy.post(0, 1, open.put(bytes));
        for (const int other : others) open.proxy.post(0, other, open.put(bytes));
    }
    return open.proxy.wait_all() && open.proxy.result() == abi::kSuccess && !open.proxy.last_error() &&
           open.proxy.longest_call() < kBlocked;
}

}  // namespace

bool killed(const Options& options, World& world, int rank) {
    use_cuda_on_this_thread(options);
    Open open(options, world, rank);
    open.proxy.start();
    world.barrier();
    if (rank == 1) {
        for (int i = 0; i < 50; ++i) open.proxy.post(0, 0, open.put(20000));
        ::raise(SIGKILL);
    }
    const bool good = put_until_failure(open, 30000) && names("PeerLost: ");
    const auto begin = Clock::now();
    open.proxy.close();
    return good && Clock::now() - begin < std::chrono::seconds(5);
}

// Rank 1 dies while somebody watches, and the others go on.
bool killed_while_watched(const Options& options, World& world, int rank) {
    use_cuda_on_this_thread(options);
    const Watching watching(options);
    Open open(options, world, rank);
    open.proxy.start();
    require(watching.quiet(), "nobody is lost");
    world.barrier();
    if (rank == 1) {
        for (int i = 0; i < 50; ++i) open.proxy.post(0, 0, open.put(20000));
        ::raise(SIGKILL);
    }
    std::vector<int> others;
    for (int other = 0; other < options.ranks; ++other)
        if (other != 1 && other != rank) others.push_back(other);
    const bool good = put_until_lost(open, watching, 30000, others) && watching.lost(1, "PeerLost");
    const auto begin = Clock::now();
    open.proxy.close();
    return good && Clock::now() - begin < std::chrono::seconds(5);
}

bool silent(const Options& options, World& world, int rank) {
    use_cuda_on_this_thread(options);
    const Watching watching(options);
    Open open(options, world, rank);
    world.barrier();
    bool good = true;
    if (rank == 0) {
        open.proxy.start();
        good = put_until_lost(open, watching, 100) && names("PeerSilent: rank 1") && watching.lost(1, "PeerSilent");
    }
    world.barrier();  // rank 1 never polls
    return good;
}

bool wrong_secret(const Options& options, World& world, int rank) {
    if (rank == 1) ::setenv("MOECOMM_JOB_SECRET", "another secret of this job", 1);
    Proxy proxy(options, world, rank);
    require(proxy.listen() == abi::kSuccess, "listen: " + logged());
    world.barrier();
    const abi::Result result = proxy.connect();
    if (rank == 1) return result == abi::kRemoteError && names("WrongSecret: rank 0: it has another MOECOMM_JOB_SECRET");
    return result == abi::kRemoteError && names("ConnectFailed: rank 1 did not connect in time; 1 connection(s) were refused");
}

bool absent(const Options& options, World& world, int rank) {
    Proxy proxy(options, world, rank);
    require(proxy.listen() == abi::kSuccess, "listen: " + logged());
    world.barrier();
    if (rank == 1) return true;
    return proxy.connect() == abi::kRemoteError && names("ConnectFailed: rank 1 did not connect in time");
}

bool left(const Options& options, World& world, int rank) {
    use_cuda_on_this_thread(options);
    const Watching watching(options);
    Open open(options, world, rank);
    open.proxy.start();
    world.barrier();
    if (rank == 1) {
        open.proxy.close();
        world.barrier();
        return true;
    }
    world.barrier();
    require(open.proxy.result() == abi::kSuccess && !open.proxy.last_error(), "a peer that left in good order is no error: " + logged());
    require(watching.quiet(), "nor a loss");
    return put_until_lost(open, watching, 100) && names("PeerClosed: rank 1 has closed the communicator") && watching.lost(1, "PeerClosed");
}

// Communicators after and beside each other, contexts made anew, memory given back and registered again.
bool again(const Options& options, World& world, int rank) {
    use_cuda_on_this_thread(options);
    Open first(options, world, rank);
    const Table& table = first.proxy.table;
    first.proxy.start();
    for (int round = 0; round < 3; ++round) {
        Open second(options, world, rank);
        second.proxy.start();
        char* memory = allocate(options, 4096, Sharing::kWindow);
        for (int i = 0; i < 3; ++i) {
            void* region = nullptr;
            const int type = options.cuda() ? abi::kPtrCuda : abi::kPtrHost;
            require(table.reg_mr(first.proxy.comm, memory, 4096, type, 0, &region) == abi::kSuccess, "regMrSym: " + logged());
            Operation put = first.put(1000);
            put.to = region;
            put.to_at = static_cast<uint64_t>(rank) * 1000;
            for (int peer = 0; peer < options.ranks; ++peer) first.proxy.post(0, peer, put);
            for (int peer = 0; peer < options.ranks; ++peer) second.proxy.post(0, peer, second.put(50000));
            require(first.proxy.wait_all() && second.proxy.wait_all(), "puts failed: " + logged());
            world.barrier();
            require(table.dereg_mr(first.proxy.comm, region) == abi::kSuccess, "deregMrSym: " + logged());
            void *request = nullptr, *rma = nullptr;
            require(table.create_context(first.proxy.comm, 1, &rma) == abi::kSuccess, "createContext");
            require(table.put(rma, 0, 0, region, 8, 0, region, 0, &request) == abi::kInvalidArgument, "memory that was given back");
            require(table.destroy_context(rma) == abi::kSuccess, "destroyContext");
        }
        world.barrier();
        second.proxy.close();
    }
    require(!first.proxy.last_error(), "an error was kept: " + logged());
    world.barrier();
    first.proxy.close();
    return true;
}

bool misuse(const Options& options, World& world, int rank) {
    use_cuda_on_this_thread(options);
    Open open(options, world, rank);
    void* request = nullptr;
    const Table& table = open.proxy.table;
    void *rma = open.proxy.rma, *window = open.window_region, *signals = open.signals_region;
    int outside = 0;
    const auto refused = [](abi::Result result) { return result == abi::kInvalidArgument || result == abi::kInvalidUsage; };
    require(refused(table.put(rma, 0, 0, &outside, 8, 0, window, 1, &request)), "a source that is not registered");
    require(refused(table.put(rma, 0, 0, window, 8, 0, &outside, 1, &request)), "a target that is not registered");
    require(refused(table.put(rma, 0, 0, window, 8, kWindowBytes - 7, window, 1, &request)), "a put beyond the end");
    require(refused(table.put(rma, 0, kWindowBytes, window, 1, 0, window, 1, &request)), "a put from beyond the end");
    require(refused(table.put(rma, 0, ~uint64_t{0}, window, 2, 0, window, 1, &request)), "an offset that wraps");
    require(refused(table.put(rma, 0, 0, window, ~uint64_t{0}, 8, window, 1, &request)), "a length that wraps");
    require(refused(table.put(rma, options.contexts, 0, window, 8, 0, window, 1, &request)), "a context that is not there");
    require(refused(table.put(rma, 0, 0, window, 8, 0, window, 99, &request)), "a rank that is not there");
    require(refused(table.get(rma, 0, kWindowBytes - 1, window, 2, 0, window, 1, &request)), "a get from beyond the end");
    require(refused(table.put_signal(rma, 0, 0, nullptr, 0, 0, nullptr, 1, 4096, signals, 1, 1, true, &request)),
            "a signal beyond the end");
    require(refused(table.put_signal(rma, 0, 0, nullptr, 0, 0, nullptr, 1, 4, signals, 1, 1, true, &request)), "half a word");
    require(refused(table.put_signal(rma, 0, 0, nullptr, 0, 0, nullptr, 1, 0, signals, 1, 7, true, &request)), "an unknown operation");
    require(refused(table.dereg_mr(open.proxy.comm, &outside)), "memory that was never registered");
    require(request == nullptr && !open.proxy.last_error(), "a refused call leaves nothing behind");
    require(names("OutOfRange: ") && names("BadHandle: ") && names("Unsupported: "), "the names of these errors");
    open.proxy.start();  // and all still works
    open.proxy.post(0, 1 - rank, open.put(100));
    require(open.proxy.wait_all(), "a put after all that: " + logged());
    world.barrier();
    return true;
}
