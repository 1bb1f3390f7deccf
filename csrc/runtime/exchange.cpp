#include "exchange.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "error.h"
#include "fd_socket.h"

namespace moecomm::runtime {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSliceMs = 50;  // time between two checks for signals and close()
constexpr int kRetryMs = 1;   // retry interval while a peer's queue is full
constexpr double kLongestTimeout = 1e6;
constexpr u32 kMagic = 0x4d6f4566;
constexpr u32 kVersion = 1;

std::string random_name() {
    u8 bits[16];
    if (::getrandom(bits, sizeof bits, 0) != sizeof bits) throw_errno("getrandom");
    std::string name = "moecomm-";
    for (const u8 byte : bits) {
        name += "0123456789abcdef"[byte >> 4];
        name += "0123456789abcdef"[byte & 15];
    }
    return name;
}

std::string list(const std::vector<int>& ranks) {
    std::string text;
    for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
}

}  // namespace

struct Exchange::Message {
    u32 magic, version;
    i32 from, to;
    u32 sequence, reserved;
    Nonce nonce;
};

// One call of share().
class Exchange::Sharing {
  public:
    Sharing(Exchange& exchange, int fd, const std::vector<std::string>& addresses)
        : exchange_(exchange), fd_(fd), addresses_(addresses), received_(exchange.ranks_) {
        for (int step = 1; step < exchange.ranks_; ++step) unsent_.push_back((exchange.rank_ + step) % exchange.ranks_);
        received_.swap(exchange.early_);
    }

    bool done() const { return unsent_.empty() && missing().empty(); }
    void send() {
        unsent_.erase(std::remove_if(unsent_.begin(), unsent_.end(), [this](int peer) { return send_to(peer); }), unsent_.end());
    }
    bool wait_and_receive(int slice_ms);  // false when interrupted by a signal
    int slice_ms() const { return unsent_.empty() ? kSliceMs : kRetryMs; }
    std::vector<Descriptor> take() { return std::move(received_); }
    [[noreturn]] void give_up(double timeout_s) const;

  private:
    std::vector<int> missing() const {
        std::vector<int> ranks;
        for (int rank = 0; rank < exchange_.ranks_; ++rank)
            if (rank != exchange_.rank_ && !received_[rank].open()) ranks.push_back(rank);
        return ranks;
    }
    bool send_to(int peer);
    void accept_all();
    void receive(int connection);
    const char* refusal(const Message& message, const Received& received) const;  // reason for refusal, or null

    Exchange& exchange_;
    int fd_;
    const std::vector<std::string>& addresses_;
    std::vector<int> unsent_;
    std::vector<Descriptor> received_;
    int refused_ = 0;
    std::string why_refused_;
};

bool Exchange::Sharing::send_to(int peer) {
    Descriptor connection = connect_to(addresses_[peer]);
    if (!connection.open()) {
        if (errno == EAGAIN) return false;
        throw OsError(errno, "rank " + std::to_string(peer) + " cannot be reached: " + std::strerror(errno));
    }
    if (!same_user(connection.get())) throw OsError(EACCES, "another user listens at the address of rank " + std::to_string(peer));
    const Message message{kMagic, kVersion, exchange_.rank_, peer, exchange_.sequence_, 0, exchange_.nonce_};
    if (send_descriptor(connection.get(), &message, sizeof message, fd_)) return true;
    if (errno == EAGAIN || errno == ETOOMANYREFS) return false;
    throw OsError(errno, "sending to rank " + std::to_string(peer) + ": " + std::strerror(errno));
}

bool Exchange::Sharing::wait_and_receive(int slice_ms) {
    std::vector<pollfd> events{{exchange_.listener_.get(), POLLIN, 0}};
    auto& connections = exchange_.connections_;
    for (const Descriptor& connection : connections) events.push_back({connection.get(), POLLIN, 0});
    if (::poll(events.data(), events.size(), slice_ms) < 0) {
        if (errno != EINTR) throw_errno("poll");
        return false;
    }
    for (size_t i = events.size(); i-- > 1;) {
        if (events[i].revents == 0) continue;
        receive(connections[i - 1].get());
        connections.erase(connections.begin() + static_cast<std::ptrdiff_t>(i - 1));
    }
    if (events[0].revents != 0) accept_all();
    return true;
}

void Exchange::Sharing::accept_all() {
    for (;;) {
        Descriptor connection(::accept4(exchange_.listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!connection.open()) {
            if (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR) return;
            throw_errno("accept");
        }
        if (same_user(connection.get())) {
            exchange_.connections_.push_back(std::move(connection));
        } else {
            ++refused_;
            why_refused_ = "another user";
        }
    }
}

void Exchange::Sharing::receive(int connection) {
    Message message{};
    Received received = receive_descriptors(connection, &message, sizeof message);
    if (const char* why = refusal(message, received)) {
        ++refused_;
        why_refused_ = why;
        return;
    }
    auto& place = message.sequence == exchange_.sequence_ ? received_ : exchange_.early_;
    place[message.from] = std::move(received.descriptors[0]);
}

const char* Exchange::Sharing::refusal(const Message& message, const Received& received) const {
    if (received.bytes != static_cast<ssize_t>(sizeof message) || message.magic != kMagic) return "not a message of moecomm";
    if (message.nonce != exchange_.nonce_) return "wrong nonce";
    if (message.version != kVersion) return "another version of moecomm";
    if (received.truncated || received.descriptors.size() != 1) return "not exactly one file descriptor";
    if (message.to != exchange_.rank_) return "meant for another rank";
    if (message.from < 0 || message.from >= exchange_.ranks_ || message.from == exchange_.rank_) return "from no rank of the job";
    const bool now = message.sequence == exchange_.sequence_;
    if (!now && message.sequence != exchange_.sequence_ + 1) return "from another call";
    if ((now ? received_ : exchange_.early_)[message.from].open()) return "sent twice";
    return nullptr;
}

void Exchange::Sharing::give_up(double timeout_s) const {
    std::string text = "rank " + std::to_string(exchange_.rank_) + " waited " + std::to_string(timeout_s) + " s";
    if (!missing().empty()) text += "; nothing came from ranks " + list(missing());
    if (!unsent_.empty()) text += "; nothing could be sent to ranks " + list(unsent_);
    if (refused_ != 0) text += "; " + std::to_string(refused_) + " connections refused, the last one: " + why_refused_;
    throw OsError(ETIMEDOUT, text);
}

Exchange::Exchange(int rank, int ranks, const Nonce& nonce) : rank_(rank), ranks_(ranks), nonce_(nonce), early_(ranks > 0 ? ranks : 0) {
    if (ranks < 1 || rank < 0 || rank >= ranks) throw std::invalid_argument("rank must lie in [0, ranks)");
    address_ = random_name();
    listener_ = listen_at(address_);
}

std::vector<Descriptor> Exchange::share(int fd, const std::vector<std::string>& addresses, double timeout_s, const Check& check) {
    if (static_cast<int>(addresses.size()) != ranks_) throw std::invalid_argument("one address a rank is needed");
    if (!(timeout_s >= 0 && timeout_s <= kLongestTimeout)) throw std::invalid_argument("timeout_s must lie in [0, 1e6]");
    std::lock_guard lock(sharing_);
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    auto next_check = Clock::now() + std::chrono::milliseconds(kSliceMs);
    Sharing sharing(*this, fd, addresses);
    while (!sharing.done()) {
        if (closing_) throw OsError(ECANCELED, "the exchange was closed");
        sharing.send();
        const bool interrupted = !sharing.wait_and_receive(sharing.done() ? 0 : sharing.slice_ms());
        if (interrupted || Clock::now() >= next_check) {
            check();
            next_check = Clock::now() + std::chrono::milliseconds(kSliceMs);
        }
        if (!sharing.done() && Clock::now() >= deadline) sharing.give_up(timeout_s);
    }
    ++sequence_;
    return sharing.take();
}

void Exchange::close() {
    closing_ = true;
    std::lock_guard lock(sharing_);
    listener_.reset();
    connections_.clear();
    early_.clear();
}

}  // namespace moecomm::runtime
