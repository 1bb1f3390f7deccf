// What might wait, and must not hold up NCCL's thread; and strangers, who must not hold up a rank.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cstring>

#include "open.h"
#include "rma_plugin/address.h"
#include "rma_plugin/copies.h"
#include "rma_plugin/handshake.h"
#include "scenarios.h"

using moecomm::rma::Descriptor;

namespace {

constexpr int kDoor = 4096;            // guests that a door has room for; kMostReceptions in mesh.cpp
constexpr int kGuests = kDoor + 64;    // so these wait outside, and whoever comes behind them
constexpr rlim_t kDescriptors = 5000;  // which is more than a process may have open by default

// A connection to the door of rank 0, and the first that it says.
Descriptor knock(World& world, const void* words, size_t bytes) {
    moecomm::rma::Address address;
    std::memcpy(&address, world.shared().handles[0], sizeof address);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = address.tcp_address;
    to.sin_port = address.tcp_port;
    Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    require(::connect(socket.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) == 0, "a stranger can't connect");
    require(::send(socket.get(), words, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes), "send");
    return socket;
}

void allow_descriptors() {
    rlimit limit{};
    require(::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_max >= kDescriptors, "this test wants 5000 descriptors");
    limit.rlim_cur = std::max(limit.rlim_cur, kDescriptors);
    require(::setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
}

}  // namespace

// They connect first, and say nothing, or nonsense, or a good hello and a bad proof.
bool strangers(const Options& options, World& world, int rank) {
    Proxy proxy(options, world, rank);
    require(proxy.listen() == abi::kSuccess, "listen: " + logged());
    world.barrier();
    std::vector<Descriptor> guests;
    for (int i = 0; rank == 1 && i < 6; ++i) {
        const std::string nonsense(i * 37, static_cast<char>('a' + i));
        guests.push_back(knock(world, nonsense.data(), nonsense.size()));
    }
    world.barrier();
    require(proxy.connect() == abi::kSuccess, "connect: " + logged());
    return rank == 1 || names("a connection was refused: it does not speak this protocol");
}

// More of them than the door has room for, before the peer comes: silent from the first, or amid their hello, or when they should prove
// what they said.
bool full_door(const Options& options, World& world, int rank) {
    allow_descriptors();
    Proxy proxy(options, world, rank);
    require(proxy.listen() == abi::kSuccess, "listen: " + logged());
    world.barrier();
    std::vector<Descriptor> guests;
    moecomm::rma::Hello hello{0x6d72616d, 0, 42, 2, 1, 0, 0, {}};
    for (int i = 0; rank == 1 && i < kGuests; ++i) guests.push_back(knock(world, &hello, static_cast<size_t>(i) % (sizeof hello + 1)));
    const abi::Result result = proxy.connect();
    require(result == abi::kSuccess, "connect: " + logged());
    return rank == 1 || names("a connection was refused: it did not say in time who it is");
}

// A GPU that ends no copy for a while.  NCCL's thread gives it as many as there is room for, and has all that it needs for them.
bool crowded(const Options& options, World& world, int rank) {
    use_cuda_on_this_thread(options);
    Open open(options, world, rank);
    world.barrier();
    constexpr int kRoom = moecomm::rma::CopyStream::kRoom;
    hold_copies(true);
    open.proxy.start();
    if (rank == 0) {
        Operation one = open.put(8);
        one.kind = Operation::kPutInline;
        open.proxy.post(0, 0, one);  // one copy, and others to ourselves are two: there is room left for half of the last
        for (int i = 0; i < 2 * kRoom; ++i) {
            for (int peer = 0; peer < options.ranks; ++peer) open.proxy.post(0, peer, open.put(100));
        }
        const auto deadline = Clock::now() + kLong;
        while (open_copies() < 2 * kRoom - 1 && Clock::now() < deadline) std::this_thread::yield();
        require(open_copies() == 2 * kRoom - 1, "copies to two ranks are open: " + std::to_string(open_copies()));
    }
    hold_copies(false);
    require(open.proxy.wait_all(), "puts failed: " + logged());
    world.barrier();
    open.proxy.close();
    return open.proxy.longest_call() < kBlocked;
}

// The last rank registers nothing.  What the others had mapped of each other by then is given back while their threads are at work.
bool half_registered(const Options& options, World& world, int rank) {
    use_cuda_on_this_thread(options);
    Open open(options, world, rank);
    open.proxy.start();
    const int last = options.ranks - 1, mapped = mapped_windows();
    require(mapped > last, "windows of all others are mapped beside our own");
    if (rank < last) {
        char* memory = allocate(options, 4096, Sharing::kWindow);
        void* region = nullptr;
        require(open.proxy.table.reg_mr(open.proxy.comm, memory, 4096, abi::kPtrCuda, 0, &region) == abi::kRemoteError, "regMrSym");
        require(region == nullptr && names("ConnectFailed: registering memory with rank 2: nothing came"), "its error");
        require(mapped_windows() == mapped + 1, "only the memory itself is still mapped");
    }
    world.barrier();
    for (int peer = 0; peer < options.ranks; ++peer) open.proxy.post(0, peer, open.put(100));
    require(open.proxy.wait_all(), "puts after that: " + logged());
    world.barrier();
    open.proxy.close();
    return true;
}
