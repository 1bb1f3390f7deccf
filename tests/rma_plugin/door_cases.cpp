// Strangers at the door of a rank, who must neither hold it up nor learn anything; and a rank that can't open its door.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "address.h"
#include "failure.h"
#include "handshake.h"
#include "open.h"
#include "scenarios.h"

using namespace moecomm::rma;

namespace {

constexpr int kDoor = 4096;            // guests that a door has room for; kMostReceptions in mesh.cpp
constexpr int kGuests = kDoor + 64;    // so these wait outside, and whoever comes behind them
constexpr rlim_t kDescriptors = 5000;  // which is more than a process may have open by default

// A connection to the door of rank 0, and the first that it says.
Descriptor knock(World& world, const void* words, size_t bytes) {
    Address address;
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

Hello hello_of_rank_1() { return {0x6d72616d, 0, 42, 2, 1, 0, kProtocolVersion, {}}; }

// Return the proof of a hello and a nonce, by the side that connects, 'c', or accepts, 'a'.
std::string proof_of(char side, const Hello& hello, const void* nonce) {
    std::string text(1, side);
    text.append(reinterpret_cast<const char*>(&hello), sizeof hello).append(static_cast<const char*>(nonce), 32);
    const Digest digest = hmac_sha256(std::getenv("MOECOMM_JOB_SECRET"), text.data(), text.size());
    return std::string(digest.begin(), digest.end());
}

// All that comes from a door until it closes the connection.
std::string read_to_end(const Descriptor& socket) {
    std::string all;
    char some[256];
    for (long got; (got = ::recv(socket.get(), some, sizeof some, 0)) > 0;) all.append(some, static_cast<size_t>(got));
    return all;
}

// A stranger accepts our connection, and answers with `proof`, or with our own proof if that is empty.
void connect_to_impostor(const std::string& proof) {
    int ends[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "socketpair");
    const Descriptor ours(ends[0]), his(ends[1]);
    const auto deadline = Clock::now() + kLong;
    std::thread impostor([&] {
        Hello hello{};
        receive_all(his.get(), &hello, sizeof hello, deadline);
        const Challenge challenge{hello.magic, hello.version, {1, 2, 3}};
        send_all(his.get(), &challenge, sizeof challenge, deadline);
        Verdict verdict{hello.magic, Answer::kAccepted, {}};
        receive_all(his.get(), verdict.proof.data(), verdict.proof.size(), deadline);
        if (!proof.empty()) std::copy(proof.begin(), proof.end(), verdict.proof.begin());
        send_all(his.get(), &verdict, sizeof verdict, deadline);
    });
    std::string said;
    try {
        introduce(ours.get(), {std::getenv("MOECOMM_JOB_SECRET"), 42, 2, 1}, 0, Purpose::kData, deadline);
    } catch (const Failure& failure) {
        said = failure.what();
    }
    impostor.join();
    require(said == "WrongSecret: it has another MOECOMM_JOB_SECRET", "an impostor was believed: " + said);
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
    Hello older = hello_of_rank_1();
    older.version = kProtocolVersion - 1;
    if (rank == 1) guests.push_back(knock(world, &older, sizeof older));
    world.barrier();
    require(proxy.connect() == abi::kSuccess, "connect: " + logged());
    return rank == 1 || (names("a connection was refused: it does not speak this protocol") &&
                         names("a connection was refused: it speaks another version of this protocol"));
}

// More of them than the door has room for, before the peer comes: silent from the first, or amid their hello, or when they should prove
// what they said.
bool full_door(const Options& options, World& world, int rank) {
    allow_descriptors();
    Proxy proxy(options, world, rank);
    require(proxy.listen() == abi::kSuccess, "listen: " + logged());
    world.barrier();
    std::vector<Descriptor> guests;
    const Hello hello = hello_of_rank_1();
    for (int i = 0; rank == 1 && i < kGuests; ++i) guests.push_back(knock(world, &hello, static_cast<size_t>(i) % (sizeof hello + 1)));
    const abi::Result result = proxy.connect();
    require(result == abi::kSuccess, "connect: " + logged());
    return rank == 1 || names("a connection was refused: it did not say in time who it is");
}

// Rank 0 can open no descriptor for a while, and somebody waits at its door.  It does not use up a core meanwhile.
bool no_descriptors(const Options& options, World& world, int rank, bool for_ever) {
    Proxy proxy(options, world, rank);
    require(proxy.listen() == abi::kSuccess, "listen: " + logged());
    world.barrier();
    std::vector<Descriptor> guests;
    if (rank == 1) guests.push_back(knock(world, "", 0));
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
    use_cuda_on_this_thread(options);
    Open open(options, world, rank);
    char* memory = allocate(options, 4096, Sharing::kWindow);
    world.barrier();
    const auto none = rank == 0 ? std::make_unique<NoDescriptors>() : nullptr;
    void* region = nullptr;
    const abi::Result result = open.proxy.table.reg_mr(open.proxy.comm, memory, 4096, abi::kPtrCuda, 0, &region);
    world.barrier();
    if (rank == 1) return result == abi::kSuccess && open.proxy.table.dereg_mr(open.proxy.comm, region) == abi::kSuccess;
    return result == abi::kSystemError &&
           names("System: registering memory with rank 1: a descriptor came, and this process can open no more of them");
}

// A stranger gets no digest that is made with the secret, whatever it sends.  A rank that connects believes an address of the job only
// when the other side has proved that it knows the secret.
bool proofs(const Options& options, World& world, int rank) {
    Proxy proxy(options, world, rank);
    require(proxy.listen() == abi::kSuccess, "listen: " + logged());
    world.barrier();
    std::string said;
    std::thread stranger([&] {
        if (rank == 0) return;
        const Hello hello = hello_of_rank_1();
        const std::string wrong(32, 'w');
        const Descriptor socket = knock(world, &hello, sizeof hello);
        require(::send(socket.get(), wrong.data(), wrong.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(wrong.size()), "send");
        said = read_to_end(socket);
        require(said.size() >= 40, "no challenge came");
        for (const char side : {'a', 'c'}) {
            require(said.find(proof_of(side, hello, said.data() + 8)) == std::string::npos, "a stranger got a proof");
        }
        const std::string refusal = said.substr(sizeof(Challenge) + sizeof(uint32_t));
        require(refusal == std::string("\2\0\0\0", 4) + std::string(32, '\0'), "and something other than a refusal");
    });
    stranger.join();
    require(proxy.connect() == abi::kSuccess, "connect: " + logged());
    if (rank == 0) return names("a connection was refused: it has another secret");
    connect_to_impostor(std::string(32, '\0'));
    connect_to_impostor("");
    return true;
}

bool short_secret(const Options& options, World&, int) {
    void* library = ::dlopen(options.plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
    require(library != nullptr, "the plugin does not load");
    const Table table(library, options.table);
    void* context = nullptr;
    ::setenv("MOECOMM_JOB_SECRET", "fifteen bytes..", 1);
    require(table.init(&context, log_line) == abi::kInvalidUsage && context == nullptr, "a short secret was taken");
    require(names("Unsupported: MOECOMM_JOB_SECRET has 15 bytes: want at least 16"), "its error");
    require(logged().find("fifteen") == std::string::npos, "the secret is in the log");
    ::setenv("MOECOMM_JOB_SECRET", "sixteen bytes...", 1);
    return table.init(&context, log_line) == abi::kSuccess && table.finalize(context) == abi::kSuccess;
}
