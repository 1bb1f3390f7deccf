// Strangers at the door of a rank; and a rank that can open no descriptor.
#include <sys/resource.h>
#include <sys/socket.h>

#include <cstring>
#include <ctime>

#include "mesh.h"
#include "runtime/fd_socket.h"
#include "scenarios.h"

using namespace moecomm::rma;

namespace {

Address door_of(World& world, int rank) {
    Address address;
    std::memcpy(&address, world.shared().handles[rank], sizeof address);
    return address;
}

double cpu_seconds() {
    timespec now{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// As long as it lives, this process can open no descriptor beside those that it has.
class NoDescriptors {
  public:
    NoDescriptors() {
        const Descriptor next(::dup(0));
        require(next.open() && ::getrlimit(RLIMIT_NOFILE, &before_) == 0, "getrlimit");
        const rlimit limit{static_cast<rlim_t>(next.get()), before_.rlim_max};
        require(::setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    }
    ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
    NoDescriptors(const NoDescriptors&) = delete;
    NoDescriptors& operator=(const NoDescriptors&) = delete;

  private:
    rlimit before_{};
};

}  // namespace

// They connect first, and say nothing, or nonsense, or are not whom this rank waits for.
bool strangers(const Options& options, World& world, int rank) {
    Proxy proxy(options, world, rank);
    proxy.listen();
    std::vector<Descriptor> guests;
    const auto knock = [&](const void* words, size_t bytes) {
        guests.push_back(moecomm::runtime::connect_to(door_of(world, 0).name));
        require(guests.back().open(), "a stranger can't connect");
        if (bytes > 0) require(::send(guests.back().get(), words, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes), "send");
    };
    if (rank == 1) {
        const std::string nonsense(100, 'a');
        for (const size_t bytes : {0, 1, 24, 100}) knock(nonsense.data(), bytes);
        Hello hello{kHelloMagic, 1, {}};
        knock(&hello, sizeof hello);  // without the token
        std::memcpy(hello.token, door_of(world, 0).token, sizeof hello.token);
        for (const int from : {-1, 0, 2, 1000000}) {
            hello.from = from;
            knock(&hello, sizeof hello);
        }
    }
    world.barrier();
    require(proxy.connect() == abi::kSuccess, "connect: " + logged());
    return rank == 1 || names("a connection was refused: it is no rank that is missing");
}

// Rank 0 can open no descriptor, for a while or, as variant "ever", at all, and somebody waits at its door.  It does not use up a core
// meanwhile.
bool no_descriptors(const Options& options, World& world, int rank) {
    const bool for_ever = options.variant == "ever";
    Proxy proxy(options, world, rank);
    proxy.listen();
    const Descriptor guest = rank == 1 ? moecomm::runtime::connect_to(door_of(world, 0).name) : Descriptor();
    world.barrier();
    if (rank == 1) return for_ever || proxy.connect() == abi::kSuccess;
    auto none = std::make_unique<NoDescriptors>();
    std::thread later([&] {
        if (for_ever) return;
        std::this_thread::sleep_for(std::chrono::seconds(1));
        none.reset();
    });
    const double before = cpu_seconds();
    const abi::Result result = proxy.connect();
    const double used = cpu_seconds() - before;
    later.join();
    require(used < 0.1, "waiting for a descriptor took " + std::to_string(used) + " s of a core");
    if (!for_ever) return result == abi::kSuccess;
    return result == abi::kRemoteError &&
           names("rank 1 did not connect in time; this process can accept no connection: Too many open files");
}

// A window comes to rank 0, which can open no descriptor.  That is no lie of rank 1.
bool no_descriptor_for_window(const Options& options, World& world, int rank) {
    Open open(options, world, rank);
    char* memory = allocate_window(4096);
    world.barrier();
    const auto none = rank == 0 ? std::make_unique<NoDescriptors>() : nullptr;
    void* region = nullptr;
    const abi::Result result = open.proxy.table.regMrSym(open.proxy.comm, memory, 4096, abi::kPtrCuda, 0, &region);
    world.barrier();
    if (rank == 1) return result == abi::kSuccess && open.proxy.table.deregMrSym(open.proxy.comm, region) == abi::kSuccess;
    return result == abi::kSystemError &&
           names("System: registering memory with rank 1: a descriptor came, and this process can open no more of them");
}
