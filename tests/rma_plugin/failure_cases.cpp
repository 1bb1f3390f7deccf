// Peers that die, sleep, leave, do not come, or are elsewhere; and a caller who asks for nonsense.
#include <dlfcn.h>

#include <csignal>
#include <cstdlib>

#include "address.h"
#include "protocol/record.h"
#include "scenarios.h"

namespace {

// A word that kernels look at while they wait for a peer.
class Watching {
  public:
    explicit Watching(const Options& options) : library_(::dlopen(options.plugin.c_str(), RTLD_NOW)), job_(std::getenv("MOECOMM_RMA_JOB")) {
        require(function<Watch>("moecomm_rma_watch")(job_.c_str(), &word_) == 0 && first() == "-1 ", "watch");
    }
    ~Watching() {
        function<Watch>("moecomm_rma_watch")(job_.c_str(), nullptr);
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
        const int rank = function<Loss>("moecomm_rma_loss")(job_.c_str(), 0, text, sizeof text);
        return std::to_string(rank) + " " + text;
    }

    void* const library_;
    const std::string job_;
    uint32_t word_ = 0;
};

// Puts to rank 1 until the thread has failed; what it takes in the meantime is bounded by its queue.
bool put_until_failure(Open& open, uint64_t bytes) {
    const auto deadline = Clock::now() + kLong;
    while (open.proxy.result() == abi::kSuccess && Clock::now() < deadline) open.proxy.post(0, 1, open.put(bytes));
    return open.proxy.result() == abi::kRemoteError && open.proxy.last_error() && open.proxy.longest_call() < kBlocked;
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

// Rank 1 dies.  Where somebody watches, the others go on.
bool killed(const Options& options, World& world, int rank) {
    const bool watched = options.variant == "watched";
    const std::unique_ptr<Watching> watching(watched ? new Watching(options) : nullptr);
    Open open(options, world, rank);
    open.proxy.start();
    require(!watched || watching->quiet(), "nobody is lost");
    world.barrier();
    if (rank == 1) {
        for (int i = 0; i < 50; ++i) open.proxy.post(0, 0, open.put(20000));
        ::raise(SIGKILL);
    }
    std::vector<int> others;
    for (int other = 0; other < options.ranks; ++other)
        if (other != 1 && other != rank) others.push_back(other);
    const bool good = watched ? put_until_lost(open, *watching, 30000, others) && watching->lost(1, "PeerLost")
                              : put_until_failure(open, 30000) && names("PeerLost: ");
    const auto begin = Clock::now();
    open.proxy.close();
    return good && Clock::now() - begin < std::chrono::seconds(5);
}

bool silent(const Options& options, World& world, int rank) {
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

bool absent(const Options& options, World& world, int rank) {
    Proxy proxy(options, world, rank);
    proxy.listen();
    const bool comes = options.variant != std::to_string(rank);
    const abi::Result result = comes ? proxy.connect() : abi::kRemoteError;
    world.barrier();
    return !comes || (result == abi::kRemoteError &&
                      names(rank == 0 ? "ConnectFailed: rank 1 did not connect in time" : "ConnectFailed: rank 0: nothing came"));
}

// Rank 1 is on another host, or has another plugin, as its address says.
bool elsewhere(const Options& options, World& world, int rank) {
    Proxy proxy(options, world, rank);
    proxy.listen();
    moecomm::rma::Address address;
    std::memcpy(&address, world.shared().handles[1], sizeof address);
    if (options.variant == "host") ++address.boot[0];
    if (options.variant == "version") ++address.version;
    world.barrier();
    if (rank == 1) std::memcpy(world.shared().handles[1], &address, sizeof address);
    world.barrier();
    if (rank == 1) return true;
    return proxy.connect() == abi::kSystemError &&
           names(options.variant == "host" ? "NotReachable: rank 1 is on another host" : "NotReachable: rank 1 has another version");
}

bool left(const Options& options, World& world, int rank) {
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
    Open first(options, world, rank);
    const Table& table = first.proxy.table;
    first.proxy.start();
    for (int round = 0; round < 3; ++round) {
        Open second(options, world, rank);
        second.proxy.start();
        char* memory = allocate_window(4096);
        for (int i = 0; i < 3; ++i) {
            void* region = first.proxy.add(memory, 4096);
            Operation put = first.put(1000);
            put.to = region;
            put.to_at = static_cast<uint64_t>(rank) * 1000;
            for (int peer = 0; peer < options.ranks; ++peer) first.proxy.post(0, peer, put);
            for (int peer = 0; peer < options.ranks; ++peer) second.proxy.post(0, peer, second.put(50000));
            require(first.proxy.wait_all() && second.proxy.wait_all(), "puts failed: " + logged());
            world.barrier();
            first.proxy.remove(region);
            void *request = nullptr, *rma = first.proxy.add_context(1);
            require(table.iput(rma, 0, 0, region, 8, 0, region, 0, 0, &request) == abi::kInvalidArgument, "memory that was given back");
            require(table.destroyContext(rma) == abi::kSuccess, "destroyContext");
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
    Open open(options, world, rank);
    static char on_host[100];
    void *host = open.proxy.add(on_host, sizeof on_host, 0, abi::kPtrHost), *request = nullptr;
    const Table& table = open.proxy.table;
    void *rma = open.proxy.rma, *window = open.window_region, *signals = open.signals_region;
    const uint32_t peer = rank == 0 ? 1 : 0;
    int outside = 0;
    const auto refused = [](abi::Result result) { return result == abi::kInvalidArgument || result == abi::kInvalidUsage; };
    const auto put = [&](uint64_t from, void* from_region, size_t bytes, uint64_t to, void* to_region, int context = 0, uint32_t more = 0) {
        return refused(table.iput(rma, context, from, from_region, bytes, to, to_region, peer + more, 0, &request));
    };
    const auto get = [&](uint64_t from, void* from_region, size_t bytes, void* to_region) {
        return refused(table.iget(rma, 0, from, from_region, bytes, 0, to_region, peer, 0, &request));
    };
    const auto signal = [&](uint64_t at, uint32_t op) {
        return refused(table.iputSignal(rma, 0, 0, nullptr, 0, 0, nullptr, peer, at, signals, 1, op, true, 0, &request));
    };
    require(put(0, &outside, 8, 0, window), "a source that is not registered");
    require(put(0, window, 8, 0, &outside), "a target that is not registered");
    require(put(0, window, 8, kWindowBytes - 7, window), "a put beyond the end");
    require(put(kWindowBytes, window, 1, 0, window), "a put from beyond the end");
    require(put(~uint64_t{0}, window, 2, 0, window), "an offset that wraps");
    require(put(0, window, ~uint64_t{0}, 8, window), "a length that wraps");
    require(put(0, window, 8, 0, window, options.contexts), "a context that is not there");
    require(put(0, window, 8, 0, window, 0, 99), "a rank that is not there");
    require(put(0, window, 8, 0, signals) && put(0, window, 8, 0, host), "a target that this GPU has not mapped");
    require(put(0, host, 17, 0, window) && get(0, window, 8, host), "host memory, for more than an inline value");
    require(get(kWindowBytes - 1, window, 2, window), "a get from beyond the end");
    require(signal(4096, 1), "a signal beyond the end");
    require(signal(4, 1), "half a word");
    require(signal(0, 7), "an unknown operation");
    require(refused(table.deregMrSym(open.proxy.comm, &outside)), "memory that was never registered");
    require(request == nullptr && !open.proxy.last_error(), "a refused call leaves nothing behind");
    require(names("OutOfRange: ") && names("BadHandle: ") && names("Unsupported: "), "the names of these errors");
    open.proxy.start();  // and all still works
    open.proxy.post(0, static_cast<int>(peer), open.put(100));
    require(open.proxy.wait_all(), "a put after all that: " + logged());
    world.barrier();
    return true;
}
