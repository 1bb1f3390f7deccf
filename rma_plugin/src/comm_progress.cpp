#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "comm.h"
#include "log.h"
#include "losses.h"

namespace moecomm::rma {
namespace {

constexpr size_t kMostOpen = 1 << 16;                       // requests to one peer; NCCL's own queues are far shorter
constexpr auto kTestAlone = std::chrono::microseconds(20);  // if progress() was not called for this long, test() makes progress itself
constexpr int kMailATurn = 256;

}  // namespace

void Comm::check_peer(int peer) const {
    if (peer < 0 || peer >= static_cast<int>(peers_.size())) throw Failure(Fault::kOutOfRange, "there is no " + rank_name(peer));
    if (peers_[peer].failure.has_value()) throw *peers_[peer].failure;
}

Request& Comm::open_request(Context& context, int number, int peer, Request::Kind kind, const Move& move) {
    check_peer(peer);
    if (number < 0 || number >= context.count) throw Failure(Fault::kOutOfRange, "there is no context " + std::to_string(number));
    std::shared_ptr<Region> local, remote;
    if (move.bytes > 0) {
        local = registry_.by_handle(move.local);
        remote = registry_.by_handle(move.remote);
        if (!fits(move.local_at, move.bytes, local->bytes)) throw Failure(Fault::kOutOfRange, "beyond the end of a region of this rank");
        if (!fits(move.remote_at, move.bytes, remote->remote[peer].bytes)) {
            throw Failure(Fault::kOutOfRange, "beyond the end of a region of " + rank_name(peer));
        }
        if (remote->remote[peer].at == nullptr) {
            throw Failure(Fault::kUnsupported,
                          "memory of " + rank_name(peer) + " that is not one allocation of CUDA VMM with a descriptor");
        }
        // A GPU copies asynchronously between its own memory and mapped memory, but not from pageable host memory.
        if (peer != me_ && !local->on_gpu && (kind == Request::Kind::kGet || move.bytes > DirectPath::kInlineBytes)) {
            throw Failure(Fault::kUnsupported, "host memory of this rank, for more than an inline value");
        }
    }
    if (peers_[peer].open >= kMostOpen) throw Failure(Fault::kQueueFull, rank_name(peer) + " has too many operations open");
    if (free_.empty()) free_.push_back(&requests_.emplace_back());
    Request& request = *free_.back();
    free_.pop_back();
    request = Request();
    request.kind = kind;
    request.peer = peer;
    request.local = std::move(local);
    request.remote = std::move(remote);
    request.local_at = move.local_at;
    request.remote_at = move.remote_at;
    request.bytes = move.bytes;
    ++peers_[peer].open;
    return request;
}

Request* Comm::put(Context& context, int number, int peer, const Move& move, const Raise* raise) {
    times::Post post;
    const std::lock_guard<std::mutex> lock(mutex_);
    const InContext in_context(gpu_.get());
    if (peer >= 0 && peer < static_cast<int>(peers_.size()) && peers_[peer].dropped) return &dropped_;
    check_peer(peer);
    std::shared_ptr<Region> signal;
    if (raise != nullptr) {
        signal = registry_.by_handle(raise->region);
        if (raise->at % sizeof(uint64_t) != 0 || !fits(raise->at, sizeof(uint64_t), signal->remote[peer].bytes)) {
            throw Failure(Fault::kOutOfRange, "no word of the signals of " + rank_name(peer));
        }
    }
    Request& request = open_request(context, number, peer, Request::Kind::kPut, move);
    request.signal = std::move(signal);
    if (raise != nullptr) {
        request.signal_at = raise->at;
        request.signal_value = raise->value;
    }
    request.mark = post.accept(move.bytes, raise != nullptr, timed_);
    submit(request, context, number);
    return &request;
}

Request* Comm::get(Context& context, int number, int peer, const Move& move) {
    times::Post post;
    const std::lock_guard<std::mutex> lock(mutex_);
    const InContext in_context(gpu_.get());
    Request& request = open_request(context, number, peer, Request::Kind::kGet, move);
    request.mark = post.accept(move.bytes, false, timed_);
    ++gets_issued_;
    ++request.held;
    gets_.push_back(&request);
    submit(request, context, number);
    return &request;
}

Request* Comm::flush() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) free_.push_back(&requests_.emplace_back());
    Request& request = *free_.back();
    free_.pop_back();
    request = Request();
    request.kind = Request::Kind::kFlush;
    request.peer = me_;
    request.gets_before = gets_issued_;
    ++peers_[me_].open;
    return &request;
}

// Errors of the peer are kept with the peer and reported by test(), because the request exists.
void Comm::submit(Request& request, Context& context, int number) try {
    Peer& peer = peers_[request.peer];
    peer.direct->push(request);
    if (request.kind == Request::Kind::kGet) return;
    Lane& lane = context.lanes[static_cast<size_t>(number) * peers_.size() + static_cast<size_t>(request.peer)];
    ++request.held;
    lane.requests.push_back(&request);
    if (!lane.active) peer.lanes.push_back(&lane);
    lane.active = true;
} catch (const Failure& failure) {
    fail(request.peer, failure);
}

bool Comm::test(Request* request) {
    times::Poll poll;
    if (request == &dropped_) return true;
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool flush = request->kind == Request::Kind::kFlush;
    const auto done = [&] { return flush ? gets_ended_ >= request->gets_before : request->done(); };
    if (!done() && Clock::now() - progressed_ > kTestAlone && progress_all()) poll.found();
    if (done()) {
        poll.found();
        close_request(*request);
        return true;
    }
    if (request->kind == Request::Kind::kPut && peers_[request->peer].dropped) {
        if (request->mark.open != nullptr) request->mark.end();
        return true;  // not closed: queues may point to it as long as this object lives
    }
    const std::optional<Failure>& failure = flush ? first_failure_ : peers_[request->peer].failure;
    if (failure.has_value()) throw *failure;
    return false;
}

void Comm::close_request(Request& request) {
    --peers_[request.peer].open;
    request.released = true;
    if (request.held > 0) {
        released_.push_back(&request);
        return;
    }
    request = Request();
    free_.push_back(&request);
}

void Comm::progress() {
    times::Poll poll;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (progress_all()) poll.found();
}

bool Comm::failed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return first_failure_.has_value();
}

bool Comm::progress_all() {
    const uint64_t ended = timed_.ended;
    bool wrote = false;
    const InContext in_context(gpu_.get());
    const Clock::time_point now = progressed_ = Clock::now();
    epoll_event events[64];
    const int ready = ::epoll_wait(epoll_.get(), events, 64, 0);
    for (int i = 0; i < ready; ++i) peers_[events[i].data.u32].hung_up = true;
    for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
        if (!peers_[rank].failure.has_value()) progress_peer(rank, now);
    }
    try {
        wrote = signals_.progress();
    } catch (const Failure& failure) {
        fail(me_, failure);
    }
    for (; !gets_.empty() && gets_.front()->moved; gets_.pop_front(), ++gets_ended_) --gets_.front()->held;
    for (size_t i = 0; i < released_.size();) {
        if (released_[i]->held > 0) {
            ++i;
            continue;
        }
        *released_[i] = Request();
        free_.push_back(released_[i]);
        released_[i] = released_.back();
        released_.pop_back();
    }
    return wrote || timed_.ended != ended;
}

void Comm::progress_peer(int rank, Clock::time_point now) try {
    Peer& peer = peers_[rank];
    if (peer.from != nullptr) {
        peer.left = peer.from->left();
        Mail mail{};
        for (int i = 0; i < kMailATurn && signals_.room() && peer.from->take(mail, rank); ++i) {
            signals_.add(mail.region, mail.at, mail.value, rank);
        }
        if (peer.hung_up && !peer.from->left()) throw Failure(Fault::kPeerLost, "the connection to " + rank_name(rank) + " was closed");
    }
    peer.direct->progress();
    for (size_t i = 0; i < peer.lanes.size();) {
        Lane& lane = *peer.lanes[i];
        progress_lane(peer, lane, now);
        if (lane.requests.empty()) {
            lane.active = false;
            peer.lanes[i] = peer.lanes.back();
            peer.lanes.pop_back();
        } else {
            ++i;
        }
    }
} catch (const Failure& failure) {
    fail(rank, failure);
}

void Comm::progress_lane(Peer& peer, Lane& lane, Clock::time_point now) {
    while (!lane.requests.empty() && lane.requests.front()->moved) {
        Request& front = *lane.requests.front();
        if (front.signal != nullptr && !raise(peer, front, now)) return;
        --front.held;
        lane.requests.pop_front();
    }
}

bool Comm::raise(Peer& peer, Request& request, Clock::time_point now) {
    if (request.peer == me_) {
        if (!signals_.room()) return false;
        signals_.add(request.signal->id, request.signal_at, request.signal_value, me_);
    } else {
        if (peer.left) throw Failure(Fault::kPeerClosed, rank_name(request.peer) + " has closed the communicator");
        if (!peer.to->post({request.signal_at, request.signal_value, request.signal->id, 0}, request.peer)) {
            if (!peer.full_since.has_value()) peer.full_since = now;
            if (now - *peer.full_since > settings_.timeout) {
                throw Failure(Fault::kPeerSilent,
                              rank_name(request.peer) + " has taken no signal for " + std::to_string(settings_.timeout.count()) + " ms");
            }
            return false;
        }
        peer.full_since.reset();
    }
    request.has_signalled();
    return true;
}

void Comm::fail(int rank, Failure failure) {
    Peer& peer = peers_[rank];
    if (peer.failure.has_value()) return;
    warn(failure.what());
    failure.told = true;
    peer.failure = failure;
    // A CUDA error is of this rank, whichever peer it came up with. A get can't be dropped: its reader would take what was there before.
    const bool own = rank == me_ || failure.fault() == Fault::kCuda;
    const bool gets = std::any_of(gets_.begin(), gets_.end(), [&](const Request* get) { return get->peer == rank && !get->moved; });
    peer.dropped = losses::tell(settings_.job, me_, own ? me_ : rank, failure.what()) && !own && !gets;
    if (!peer.dropped && !first_failure_.has_value()) first_failure_ = failure;
    if (peer.socket >= 0) ::shutdown(peer.socket, SHUT_RDWR);  // not closed, because another thread may wait on it
}

}  // namespace moecomm::rma
