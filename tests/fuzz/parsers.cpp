// Everything that reads bytes of other processes, with a fuzzer's input as these bytes.  A parser may throw its errors, and nothing else.
// Tokens are right unless the input says otherwise: no mutation would find them.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <memory>

#include "exchange.h"
#include "input.h"
#include "runtime/error.h"
#include "runtime/exchange.h"
#include "runtime/fd_socket.h"
#include "signals.h"

using namespace moecomm::rma;
namespace runtime = moecomm::runtime;

namespace {

constexpr uint64_t kRegionBytes = 64;
constexpr int kPeer = 1;

struct Pair {
    Descriptor ours, theirs;
    Pair() {
        int both[2];
        require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0, "there are sockets");
        ours.reset(both[0]);
        theirs.reset(both[1]);
    }
};

std::shared_ptr<Region> host_region(Registry& registry, std::vector<std::unique_ptr<char[]>>& memory) {
    memory.emplace_back(new char[kRegionBytes]());
    auto region = std::make_shared<Region>();
    region->id = registry.next_id();
    region->base = memory.back().get();
    region->bytes = kRegionBytes;
    region->remote.resize(2);
    region->remote[kPeer].bytes = kRegionBytes;
    registry.add(region);
    return region;
}

// A card of the region that a peer registers.
void card(Input& input) {
    struct {
        uint32_t magic = 0x6d726163, id = 0;
        uint64_t bytes = 0, allocated = 0, offset = 0;
    } card;
    const uint8_t wrong = input.byte();
    card.id = input.byte();
    card.bytes = input.take<uint64_t>();
    card.allocated = input.take<uint64_t>();
    card.offset = input.take<uint64_t>();
    card.magic ^= wrong & 1;
    int both[2];
    require(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) == 0, "there are sockets");
    const Descriptor theirs(both[1]);
    std::vector<Channel> channels(2);
    channels[kPeer].socket.reset(both[0]);
    const size_t sent = std::min<size_t>(sizeof card, 255u - input.byte());
    ::send(theirs.get(), &card, sent, MSG_NOSIGNAL);
    ::shutdown(theirs.get(), SHUT_WR);
    Registry registry;
    std::vector<std::unique_ptr<char[]>> memory;
    const std::shared_ptr<Region> region = host_region(registry, memory);
    exchange(*region, channels, 0, nullptr, Clock::now() + std::chrono::seconds(60));
    require(wrong % 2 == 0 && sent == sizeof card && card.id == region->id && region->remote[kPeer].bytes == card.bytes,
            "a card is taken as it is");
    require(region->remote[kPeer].at == nullptr, "nothing is mapped without a GPU");
}

// Memory that a peer shares: as a box to write to, and as one to read signals from.
class Mails {
  public:
    void parse(Input& input) {
        const Descriptor given(::memfd_create("mail", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        require(::ftruncate(given.get(), input.byte() % 2 == 0 ? kBytes : input.take<uint16_t>()) == 0, "memory has a size");
        ::fcntl(given.get(), F_ADD_SEALS, input.byte() % 16);
        try {
            Mailbox box;
            box.open(given.get());
            box.post({}, kPeer);
        } catch (const Failure&) {
        }
        const Descriptor fd = ours_.create();
        theirs_.open(fd.get());
        auto* shared = static_cast<char*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0));
        require(shared != MAP_FAILED, "memory is shared");
        const std::unique_ptr<char, void (*)(char*)> mapped(shared, [](char* at) { ::munmap(at, kBytes); });
        while (!input.empty()) {
            step(input, shared);
            Mail mail;
            while (ours_.take(mail, kPeer)) signals_.add(mail.region, mail.at, mail.value, kPeer);
            signals_.progress();
        }
    }

  private:
    static constexpr size_t kBytes = 384 + Mailbox::kPlaces * sizeof(Mail);

    void step(Input& input, char* shared) {
        if (input.byte() % 4 != 0) {
            Mail mail{};
            mail.region = static_cast<uint32_t>(static_cast<int8_t>(input.byte()));
            mail.at = input.byte() % 2 == 0 ? input.byte() : input.take<uint64_t>();
            mail.value = input.byte();
            theirs_.post(mail, kPeer);
            return;
        }
        const size_t at = input.take<uint16_t>() % kBytes;
        const std::vector<uint8_t> bytes = input.bytes(std::min<size_t>(input.byte() % 32, kBytes - at));
        std::copy(bytes.begin(), bytes.end(), shared + at);
    }

    std::vector<std::unique_ptr<char[]>> memory_;
    Registry registry_;
    std::shared_ptr<Region> region_ = host_region(registry_, memory_);
    Signals signals_{nullptr, registry_};
    Mailbox ours_, theirs_;
};

// Parse the bytes that NCCL brings from a peer before there is a connection.
void address(Input& input) {
    const Listener listener = listen_here();
    Address theirs = listener.address;
    for (int changes = input.byte() % 8; changes > 0; --changes) {
        const size_t at = input.byte() % sizeof theirs;
        reinterpret_cast<uint8_t*>(&theirs)[at] = input.byte();
    }
    check_reachable(listener.address, theirs, kPeer);
}

// Parse what a process says that connects, where rank 1 of two is waited for.
void hello(Input& input) {
    const Listener listener = listen_here();
    const Descriptor guest = runtime::connect_to(listener.address.name);
    Hello hello{kHelloMagic, input.byte() % 2 == 0 ? static_cast<int8_t>(input.byte()) : input.take<int32_t>(), {}};
    std::copy(std::begin(listener.address.token), std::end(listener.address.token), hello.token);
    const uint8_t wrong = input.byte();
    hello.magic ^= wrong & 1;
    hello.token[15] ^= wrong & 2;
    uint8_t message[2 * sizeof hello] = {};
    std::memcpy(message, &hello, sizeof hello);
    const size_t sent = (wrong & 4) == 0 ? sizeof hello : input.byte() % sizeof message;
    ::send(guest.get(), message, sent, MSG_NOSIGNAL);
    ::shutdown(guest.get(), SHUT_RDWR);
    try {
        connect_all(listener, {listener.address, listener.address}, 0, Clock::now());
    } catch (const Failure& failure) {
        const bool seated = failure.fault() == Fault::kPeerLost;  // it has left since
        require(seated == (wrong % 4 == 0 && sent == sizeof hello && hello.from == 1), "only the rank that is missing is let in");
    }
}

// A message of a rank that shares its window, with descriptors.
void window(Input& input) {
    const std::string name = "moecomm-fuzzer-" + std::to_string(::getpid());
    const Descriptor peer = runtime::listen_at(name);
    struct {
        uint32_t magic = 0x4d6f4566, version = 1;
        int32_t from = 1, to = 0;
        uint32_t sequence = 0, reserved = 0;
        runtime::Exchange::Nonce nonce{};
    } message;
    runtime::Exchange exchange(0, 2, {});
    const Descriptor connection = runtime::connect_to(exchange.address());
    const uint8_t wrong = input.byte();
    message.magic ^= wrong & 1;
    message.nonce[15] = wrong & 2;
    message.version ^= wrong & 4;
    message.from = input.byte() % 2 == 0 ? static_cast<int8_t>(input.byte()) : input.take<int32_t>();
    message.to = static_cast<int8_t>(input.byte());
    message.sequence = static_cast<uint32_t>(static_cast<int8_t>(input.byte()));
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
    char body[2 * sizeof message] = {};
    std::memcpy(body, &message, sizeof message);
    iovec part{body, sizeof message};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    const size_t descriptors = input.byte() % 8;
    part.iov_len = input.byte() % 4 == 3 ? input.byte() % sizeof body : sizeof message;
    if (descriptors > 0) {
        header.msg_control = control;
        header.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
        cmsghdr* rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(descriptors * sizeof(int));
        for (size_t i = 0; i < descriptors; ++i) std::memcpy(CMSG_DATA(rights) + i * sizeof(int), "\0\0\0\0", sizeof(int));
    }
    ::sendmsg(connection.get(), &header, MSG_NOSIGNAL);
    // The first accepts the connection, the second reads the message.
    for (int i = 0; i < 2; ++i) {
        try {
            const std::vector<Descriptor> shared = exchange.share(0, {exchange.address(), name}, 0, [] {});
            require(wrong % 8 == 0 && message.from == 1 && message.to == 0 && shared[1].open(), "only a rank of the job gives a window");
        } catch (const runtime::OsError&) {
        }
        while (Descriptor(::accept4(peer.get(), nullptr, nullptr, SOCK_CLOEXEC)).open()) continue;
    }
}

}  // namespace

void parse(const uint8_t* data, size_t bytes) try {
    Input input(data, bytes);
    switch (input.byte() % 5) {
        case 0:
            return card(input);
        case 1:
            return Mails().parse(input);
        case 2:
            return address(input);
        case 3:
            return window(input);
        default:
            return hello(input);
    }
} catch (const Failure&) {
}
