#include "mesh.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "failure.h"
#include "log.h"
#include "runtime/fd_socket.h"

namespace moecomm::rma {
namespace {

Descriptor connect_out(const Address& address, int me, Deadline deadline) {
    Descriptor socket = connect_to(std::string(address.name, ::strnlen(address.name, sizeof address.name)), deadline);
    if (!runtime::same_user(socket.get())) throw Failure(Fault::kNotReachable, "it belongs to another user");
    Hello hello{kHelloMagic, me, {}};
    std::memcpy(hello.token, address.token, sizeof hello.token);
    send_message(socket.get(), &hello, sizeof hello, deadline);
    return socket;
}

// Accept connections of higher ranks, which come in any order, and refuse strangers.
class Door {
  public:
    Door(const Listener& listener, int me, std::vector<Channel>& channels)
        : listener_(listener), me_(me), channels_(channels), missing_(static_cast<int>(channels.size()) - 1 - me) {}

    void wait(Deadline deadline) {
        while (missing_ > 0) {
            accept_all();
            attend();
            if (missing_ > 0 && Clock::now() >= deadline) throw Failure(Fault::kConnectFailed, who_is_missing());
            if (missing_ > 0) sleep();
        }
    }

  private:
    void accept_all() {
        no_room_ = "";
        for (;;) {
            Descriptor guest(::accept4(listener_.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            if (!guest.open()) break;
            if (runtime::same_user(guest.get())) guests_.push_back(std::move(guest));
        }
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) no_room_ = std::strerror(errno);
    }

    void attend() {
        for (size_t i = 0; i < guests_.size();) {
            Hello hello{};
            const ssize_t got = ::recv(guests_[i].get(), &hello, sizeof hello, MSG_TRUNC);  // returns the true length
            if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
                ++i;
                continue;
            }
            if (got == sizeof hello && is_missing(hello)) {
                channels_[hello.from].socket = std::move(guests_[i]);
                --missing_;
            } else {
                ++refused_;
                warn("a connection was refused: it is no rank that is missing");
            }
            guests_[i] = std::move(guests_.back());
            guests_.pop_back();
        }
    }

    bool is_missing(const Hello& hello) const {
        return hello.magic == kHelloMagic && std::memcmp(hello.token, listener_.address.token, sizeof hello.token) == 0 &&
               hello.from > me_ && hello.from < static_cast<int>(channels_.size()) && !channels_[hello.from].socket.open();
    }

    void sleep() {
        std::vector<pollfd> all;
        // Without room, a connection that waits to be accepted would wake poll at once, for nothing.
        if (no_room_.empty()) all.push_back({listener_.socket.get(), POLLIN, 0});
        for (const Descriptor& guest : guests_) all.push_back({guest.get(), POLLIN, 0});
        ::poll(all.data(), all.size(), 20);
    }

    std::string who_is_missing() const {
        std::string text;
        for (int rank = me_ + 1; rank < static_cast<int>(channels_.size()); ++rank) {
            if (!channels_[rank].socket.open()) text += (text.empty() ? "" : ", ") + rank_name(rank);
        }
        text += " did not connect in time";
        if (!no_room_.empty()) text += "; this process can accept no connection: " + no_room_;
        if (refused_ > 0) text += "; " + std::to_string(refused_) + " connection(s) were refused";
        return text;
    }

    const Listener& listener_;
    const int me_;
    std::vector<Channel>& channels_;
    std::vector<Descriptor> guests_;  // they have not said yet who they are
    int missing_, refused_ = 0;
    std::string no_room_;  // why the last pass could accept no more
};

// Call `body` for each channel; a failure names the rank.
template <class Body>
void for_each(std::vector<Channel>& channels, int begin, int end, int me, const Body& body) {
    for (int rank = begin; rank < end; ++rank) {
        if (rank == me) continue;
        try {
            body(channels[rank], rank);
        } catch (const Failure& failure) {
            throw Failure(failure.fault(), rank_name(rank) + ": " + failure.text());
        }
    }
}

}  // namespace

std::vector<Channel> connect_all(const Listener& listener, const std::vector<Address>& addresses, int me, Deadline deadline) {
    const int ranks = static_cast<int>(addresses.size());
    std::vector<Channel> channels(addresses.size());
    for (int rank = 0; rank < ranks; ++rank) check_reachable(listener.address, addresses[rank], rank);
    for_each(channels, 0, me, me, [&](Channel& channel, int rank) { channel.socket = connect_out(addresses[rank], me, deadline); });
    Door(listener, me, channels).wait(deadline);
    // Each rank creates the mailbox that it reads, and gives it to the writer.
    char greeting = 'm';
    for_each(channels, 0, ranks, me, [&](Channel& channel, int) {
        channel.from = std::make_unique<Mailbox>();
        send_message(channel.socket.get(), &greeting, 1, deadline, channel.from->create().get());
    });
    for_each(channels, 0, ranks, me, [&](Channel& channel, int) {
        const Descriptor fd = receive_message(channel.socket.get(), &greeting, 1, deadline);
        if (greeting != 'm' || !fd.open()) throw Failure(Fault::kPeerLied, "it sent no mailbox");
        channel.to = std::make_unique<Mailbox>();
        channel.to->open(fd.get());
    });
    return channels;
}

}  // namespace moecomm::rma
