#include "mesh.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

#include "failure.h"
#include "log.h"
#include "runtime/fd_socket.h"

namespace moecomm::rma {
namespace {

constexpr size_t kMostReceptions = 4096;  // at once; further connections wait until one of these is accepted or refused

std::string text_of(const char* name, size_t bytes) { return std::string(name, ::strnlen(name, bytes)); }

void connect_out(Channel& channel, const Address& address, const Identity& identity, int to, std::chrono::milliseconds timeout,
                 Deadline deadline) {
    for (const Purpose purpose : {Purpose::kControl, Purpose::kData}) {
        Descriptor& socket = purpose == Purpose::kControl ? channel.control : channel.data;
        if (channel.route == Route::kLocal) {
            socket = connect_local(text_of(address.name, sizeof address.name), deadline);
            if (!runtime::same_user(socket.get())) throw Failure(Fault::kWrongSecret, "it belongs to another user");
        } else {
            socket = connect_tcp({address.tcp_address, address.tcp_port}, deadline);
            tune_tcp(socket.get(), timeout);
        }
        introduce(socket.get(), identity, to, purpose, deadline);
    }
}

// Accept connections of higher ranks, which come in any order, and refuse strangers.
class Door {
  public:
    Door(const Listener& listener, const Identity& identity, std::vector<Channel>& channels, std::chrono::milliseconds timeout)
        : listener_(listener), identity_(identity), channels_(channels), timeout_(timeout) {
        missing_ = 2 * (identity.ranks - 1 - identity.me);
    }

    void wait(Deadline deadline) {
        while (missing_ > 0) {
            no_room_ = "";
            accept(listener_.local, true);
            accept(listener_.tcp, false);
            attend();
            if (missing_ > 0 && Clock::now() >= deadline) throw Failure(Fault::kConnectFailed, who_is_missing());
            if (missing_ > 0) sleep();
        }
    }

  private:
    struct Guest {
        Reception reception;
        bool local;
    };

    void accept(const Descriptor& listener, bool local) {
        if (!listener.open()) return;
        while (guests_.size() < kMostReceptions) {
            Accepted accepted = accept_from(listener.get());
            if (accepted.no_room != nullptr) no_room_ = accepted.no_room;
            if (!accepted.socket.open()) return;
            if (local && !runtime::same_user(accepted.socket.get())) continue;
            if (!local) tune_tcp(accepted.socket.get(), timeout_);
            guests_.push_back({Reception(std::move(accepted.socket)), local});
        }
    }

    void attend() {
        for (size_t i = 0; i < guests_.size();) {
            const Reception::State state = guests_[i].reception.step(identity_);
            if (state == Reception::State::kWaiting) {
                ++i;
                continue;
            }
            if (state == Reception::State::kAccepted) seat(guests_[i]);
            if (state == Reception::State::kRefused) {
                ++refused_;
                last_refusal_ = guests_[i].reception.why;
                warn(std::string("a connection was refused: ") + last_refusal_);
            }
            if (i + 1 < guests_.size()) guests_[i] = std::move(guests_.back());  // unordered, because thousands may be refused at once
            guests_.pop_back();
        }
    }

    void seat(Guest& guest) {
        Channel& channel = channels_[guest.reception.hello.from];
        Descriptor& place = guest.reception.hello.purpose == 0 ? channel.control : channel.data;
        const bool expected = static_cast<int>(guest.reception.hello.from) > identity_.me;
        if (!expected || place.open() || guest.local != (channel.route == Route::kLocal)) return;
        place = std::move(guest.reception.socket);
        --missing_;
    }

    void sleep() {
        std::vector<pollfd> all;
        // Without room, a connection that waits to be accepted would wake poll at once, for nothing.
        const bool room = guests_.size() < kMostReceptions && no_room_.empty();
        if (room && listener_.local.open()) all.push_back({listener_.local.get(), POLLIN, 0});
        if (room && listener_.tcp.open()) all.push_back({listener_.tcp.get(), POLLIN, 0});
        for (const Guest& guest : guests_) all.push_back({guest.reception.socket.get(), POLLIN, 0});
        ::poll(all.data(), all.size(), 20);
    }

    std::string who_is_missing() const {
        std::string text;
        for (int rank = identity_.me + 1; rank < identity_.ranks; ++rank) {
            if (channels_[rank].control.open() && channels_[rank].data.open()) continue;
            text += (text.empty() ? "" : ", ") + rank_name(rank);
        }
        text += " did not connect in time";
        if (!no_room_.empty()) text += "; this process can accept no connection: " + no_room_;
        if (refused_ > 0) text += "; " + std::to_string(refused_) + " connection(s) were refused, the last because " + last_refusal_;
        return text;
    }

    const Listener& listener_;
    const Identity& identity_;
    std::vector<Channel>& channels_;
    std::chrono::milliseconds timeout_;
    std::vector<Guest> guests_;
    int missing_ = 0, refused_ = 0;
    std::string no_room_;  // why the last pass could accept no more
    const char* last_refusal_ = "";
};

// Each rank creates the mailbox that it reads, and gives it to the writer.
void exchange_mailboxes(std::vector<Channel>& channels, Deadline deadline) {
    const char greeting = 'm';
    for (Channel& channel : channels) {
        if (!channel.control.open() || channel.route != Route::kLocal) continue;
        channel.from = std::make_unique<Mailbox>();
        const Descriptor fd = channel.from->create();
        send_all(channel.control.get(), &greeting, 1, deadline, fd.get());
    }
    for (size_t rank = 0; rank < channels.size(); ++rank) {
        Channel& channel = channels[rank];
        if (!channel.control.open() || channel.route != Route::kLocal) continue;
        char got = 0;
        const std::vector<Descriptor> came = receive_all(channel.control.get(), &got, 1, deadline);
        if (got != greeting || came.size() != 1) throw Failure(Fault::kPeerLied, rank_name(static_cast<int>(rank)) + " sent no mailbox");
        channel.to = std::make_unique<Mailbox>();
        channel.to->open(came[0].get());
    }
}

}  // namespace

std::vector<Channel> connect_all(const Listener& listener, const std::vector<Address>& addresses, const Identity& identity,
                                 std::chrono::milliseconds timeout) {
    const Deadline deadline = Clock::now() + timeout;
    std::vector<Channel> channels(addresses.size());
    for (int rank = 0; rank < identity.ranks; ++rank) {
        if (rank != identity.me) channels[rank].route = route_between(listener.address, addresses[rank], rank);
    }
    for (int rank = 0; rank < identity.me; ++rank) {
        try {
            connect_out(channels[rank], addresses[rank], identity, rank, timeout, deadline);
        } catch (const Failure& failure) {
            throw Failure(failure.fault(), rank_name(rank) + ": " + failure.text());
        }
    }
    Door(listener, identity, channels, timeout).wait(deadline);
    exchange_mailboxes(channels, deadline);
    return channels;
}

}  // namespace moecomm::rma
