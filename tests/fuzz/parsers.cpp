// Everything that reads bytes of other processes, with a fuzzer's input as these bytes.  A parser may throw its errors, and nothing else.
// Checksums and proofs are right unless the input says otherwise: no mutation would find them.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <deque>
#include <memory>
#include <optional>
#include <thread>

#include "crc32c.h"
#include "exchange.h"
#include "input.h"
#include "link.h"
#include "runtime/error.h"
#include "runtime/exchange.h"
#include "runtime/fd_socket.h"

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

// Append all bytes that are there now; false: nothing will come any more.
bool read_all(int socket, std::vector<uint8_t>& to) {
    uint8_t some[4096];
    for (;;) {
        const ssize_t got = ::recv(socket, some, sizeof some, 0);
        if (got <= 0) return got < 0;
        to.insert(to.end(), some, some + got);
    }
}

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

// A link with operations of ours under way, and frames of a peer.
class Frames {
  public:
    Frames() : region_(host_region(registry_, memory_)), gone_(host_region(registry_, memory_)) {
        registry_.remove(*gone_);
        link_.emplace(std::move(sockets_.ours), kPeer, nullptr, copies_, registry_, signals_, std::chrono::seconds(60));
    }

    void parse(Input& input) try {
        while (!input.empty()) {
            switch (input.byte() % 8) {
                case 0:
                    push(input, Request::Kind::kPut);
                    break;
                case 1:
                    push(input, Request::Kind::kGet);
                    break;
                case 2:
                    write(input.bytes(input.byte()));
                    break;
                case 3:
                    if (region_->registered) registry_.remove(*region_);
                    signals_.forget(*region_);
                    break;
                case 4:
                    answer_gets();
                    break;
                default:
                    frame(input);
                    break;
            }
            turn();
            if (link_->closed()) return link_->say_bye(Clock::now());
        }
    } catch (const Failure&) {
    }

  private:
    void push(Input& input, Request::Kind kind) {
        if (!region_->registered) return;  // Comm has looked it up
        Request& request = requests_.emplace_back();
        request.kind = kind;
        request.peer = kPeer;
        request.local = request.remote = region_;
        request.bytes = input.byte() % (kRegionBytes + 1);
        request.local_at = input.byte() % (kRegionBytes - request.bytes + 1);
        if (kind == Request::Kind::kPut && input.byte() % 2 == 1) request.signal = region_;
        if (kind == Request::Kind::kGet) asked_.push_back(request.bytes);
        link_->push(request, true);
    }

    // Data for the gets that are open, as an honest peer sends it.
    void answer_gets() {
        for (; !asked_.empty(); asked_.pop_front()) {
            Frame data{};
            data.type = FrameType::kData;
            data.flags = kEndsOperation;
            data.payload = static_cast<uint32_t>(asked_.front());
            data.value = answered_++;
            send(data, std::vector<uint8_t>(asked_.front(), 7));
        }
    }

    void frame(Input& input) {
        Frame frame{};
        frame.type = static_cast<FrameType>(input.byte());
        frame.flags = input.byte();
        frame.region = static_cast<uint32_t>(static_cast<int8_t>(input.byte()));
        const uint8_t wide = input.byte();  // which numbers have all their bytes in the input, and which have one
        frame.payload = wide % 2 == 1 ? input.take<uint32_t>() : input.byte();
        frame.offset = wide / 2 % 2 == 1 ? input.take<uint64_t>() : input.byte();
        frame.value = wide / 4 % 2 == 1 ? input.take<uint64_t>() : input.byte();
        frame.total = wide / 8 % 2 == 1 ? input.take<uint64_t>() : input.byte();
        std::vector<uint8_t> payload = input.bytes(frame.payload);
        if (frame.payload <= 2 * kMostPayload) payload.resize(frame.payload);
        send(frame, payload);
    }

    void send(Frame frame, const std::vector<uint8_t>& payload) {
        const uint32_t claimed = frame.payload;
        frame.payload = static_cast<uint32_t>(payload.size());
        seal(frame, place_++, payload.data());
        frame.payload = claimed;
        frame.check = crc32c(&frame, offsetof(Frame, check));
        const auto* header = reinterpret_cast<const uint8_t*>(&frame);
        write(std::vector<uint8_t>(header, header + sizeof frame));
        write(payload);
    }

    void write(const std::vector<uint8_t>& bytes) {
        for (size_t at = 0; at < bytes.size();) {
            const ssize_t sent = ::send(sockets_.theirs.get(), bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
            if (sent > 0) at += static_cast<size_t>(sent);
            turn();
            if (link_->closed()) return;  // it reads no more
        }
    }

    void turn() {
        link_->receive();
        signals_.progress();
        link_->send();
        taken_.clear();
        read_all(sockets_.theirs.get(), taken_);
    }

    std::vector<std::unique_ptr<char[]>> memory_;
    Registry registry_;
    std::shared_ptr<Region> region_, gone_;
    Signals signals_{nullptr, registry_};
    Link::Shared copies_{nullptr};
    std::deque<Request> requests_;
    Pair sockets_;
    std::optional<Link> link_;
    std::vector<uint8_t> taken_;
    std::deque<uint64_t> asked_;
    uint64_t place_ = 0, answered_ = 0;
};

// Changes some bytes of a message, or adds some; false: it is cut short, and nothing follows.
bool change(Input& input, std::vector<uint8_t>& message) {
    for (int changes = input.byte() % 4; changes > 0; --changes) {
        const uint8_t kind = input.byte() % 4, value = input.byte();
        if (kind == 3) {
            message.resize(std::min<size_t>(message.size(), value));
            return false;
        }
        if (kind == 2) {
            const std::vector<uint8_t> more = input.bytes(value);
            message.insert(message.end(), more.begin(), more.end());
        } else if (!message.empty()) {
            message[value % message.size()] ^= input.byte();
        }
    }
    return true;
}

// Two sides of a handshake, and somebody between them who changes bytes.  Who connects may have another secret, and lie about ranks.
class Handshake {
  public:
    void parse(Input& input) {
        const Identity here{"secret", 7, 4, kMe};
        const uint8_t differs = input.byte();
        const Identity there{(differs & 1) != 0 ? "other" : "secret", (differs & 2) != 0 ? 8u : 7u, (differs & 4) != 0 ? 5 : 4,
                             static_cast<int8_t>(input.byte())};
        const int to = static_cast<int8_t>(input.byte());
        const auto purpose = static_cast<Purpose>(input.byte());
        std::thread connecting([&there, to, purpose, socket = std::move(caller_.ours)]() mutable {
            try {
                introduce(socket.get(), there, to, purpose, Clock::now() + std::chrono::seconds(60));
            } catch (const Failure&) {
            }
            socket.reset();
        });
        Reception reception(std::move(door_.ours));
        const Reception::State state = carry(input, reception, here);
        caller_.theirs.reset();
        connecting.join();
        if (state != Reception::State::kAccepted) return;
        const Hello& hello = reception.hello;
        require((differs & 7) == 0, "who is accepted has the secret, and belongs to the communicator");
        require(hello.from < 4 && hello.from != kMe && hello.to == kMe && hello.purpose <= 1, "who is accepted is a rank");
    }

  private:
    static constexpr int kMe = 1;

    Reception::State carry(Input& input, Reception& reception, const Identity& here) {
        for (bool more = true;;) {
            wait_for(caller_.theirs.get(), POLLIN, Clock::now() + std::chrono::seconds(60));
            more = pass(input, caller_.theirs, door_.theirs) && more;
            if (!more) door_.theirs.reset();
            const Reception::State state = reception.step(here);
            if (!more || !pass(input, door_.theirs, caller_.theirs) || state != Reception::State::kWaiting) return state;
        }
    }

    bool pass(Input& input, const Descriptor& from, const Descriptor& to) {
        std::vector<uint8_t> message;
        const bool open = read_all(from.get(), message), whole = change(input, message);
        if (!message.empty()) ::send(to.get(), message.data(), message.size(), MSG_NOSIGNAL);
        return open && whole;
    }

    Pair caller_, door_;
};

// A card of the region that a peer registers.
void card(Input& input) {
    struct {
        uint32_t magic = 0x6d726163, id = 0;
        uint64_t bytes = 0, allocated = 0, offset = 0;
        uint32_t pad = 0, check = 0;
    } card;
    const uint8_t wrong = input.byte();
    card.id = input.byte();
    card.bytes = input.take<uint64_t>();
    card.allocated = input.take<uint64_t>();
    card.offset = input.take<uint64_t>();
    card.magic ^= wrong & 1;
    card.check = crc32c(&card, sizeof card - sizeof card.check) ^ (wrong & 2);
    Pair sockets;
    std::vector<Channel> channels(2);
    channels[kPeer].control = std::move(sockets.ours);
    send_some(sockets.theirs.get(), &card, std::min<size_t>(sizeof card, 255u - input.byte()), nullptr, 0);
    ::shutdown(sockets.theirs.get(), SHUT_WR);
    Registry registry;
    std::vector<std::unique_ptr<char[]>> memory;
    const std::shared_ptr<Region> region = host_region(registry, memory);
    exchange(*region, channels, 0, nullptr, Clock::now() + std::chrono::seconds(60));
    require(wrong % 4 == 0 && card.id == region->id && region->remote[kPeer].bytes == card.bytes, "a card is taken as it is");
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
    static constexpr size_t kBytes = 256 + Mailbox::kPlaces * sizeof(Mail);

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
    const Listener listener = listen_everywhere({});
    Address theirs = listener.address;
    for (int changes = input.byte() % 8; changes > 0; --changes) {
        const size_t at = input.byte() % sizeof theirs;
        reinterpret_cast<uint8_t*>(&theirs)[at] = input.byte();
    }
    route_between(listener.address, theirs, kPeer);
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
    switch (input.byte() % 6) {
        case 0:
            return Frames().parse(input);
        case 1:
            return Handshake().parse(input);
        case 2:
            return card(input);
        case 3:
            return Mails().parse(input);
        case 4:
            return address(input);
        default:
            return window(input);
    }
} catch (const Failure&) {
}
