#include "comm.h"

#include <sys/epoll.h>

#include <algorithm>
#include <thread>

#include "log.h"

namespace moecomm::rma {
namespace {

constexpr auto kLongestCopy = std::chrono::seconds(2);  // wait for open copies before memory is given back
constexpr uint64_t kMostShadow = 64 * 1024 * 1024;

}  // namespace

Comm::Comm(std::vector<Channel> channels, int me, const Settings& settings, std::shared_ptr<Gpu> gpu)
    : me_(me),
      settings_(settings),
      gpu_(std::move(gpu)),
      channels_(std::move(channels)),
      signals_(gpu_, registry_),
      peers_(channels_.size()),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (!epoll_.open()) throw Failure(Fault::kSystem, "epoll_create1");
    // Create all streams, events and pinned memory here. Later, a kernel may run that waits for this plugin, and creating them may wait for
    // the kernel.
    for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
        Peer& peer = peers_[rank];
        Channel& channel = channels_[rank];
        peer.direct = std::make_unique<DirectPath>(gpu_, rank == me_);
        if (rank == me_) continue;
        peer.socket = channel.socket.get();
        peer.to = std::move(channel.to);
        peer.from = std::move(channel.from);
        epoll_event event{};
        event.events = EPOLLRDHUP | EPOLLET;  // only whether the connection has ended, and once
        event.data.u32 = static_cast<uint32_t>(rank);
        if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, peer.socket, &event) != 0) throw Failure(Fault::kSystem, "epoll_ctl");
    }
}

// Peers may be gone or closing: nothing here depends on them.
Comm::~Comm() {
    try {
        const InContext in_context(gpu_.get());
        for (const Peer& peer : peers_) {
            if (peer.to != nullptr && !peer.failure.has_value()) peer.to->leave();
        }
        wait_for_copies();
        for (const auto& region : retired_regions_) unmap(*region, gpu_.get());
        for (uint32_t id = 0; id < registry_.next_id(); ++id) {
            if (const auto region = registry_.by_id(id)) unmap(*region, gpu_.get());
        }
    } catch (const std::exception& error) {
        inform(std::string("closing: ") + error.what());
    }
}

void* Comm::add_memory(void* data, size_t bytes, bool on_gpu, uint64_t flags) {
    const std::lock_guard<std::mutex> control(control_);
    const InContext in_context(gpu_.get());
    if (on_gpu && gpu_ == nullptr)
        throw Failure(Fault::kUnsupported, "memory of a GPU; at connect there was no CUDA context, or no driver of CUDA 12");
    auto region = std::make_shared<Region>();
    region->base = static_cast<char*>(data);
    region->bytes = bytes;
    region->on_gpu = on_gpu;
    region->never_reset = on_gpu && (flags & abi::kSignalNeverReset) != 0 && bytes <= kMostShadow;
    if (region->never_reset) region->shadow.resize(bytes / sizeof(uint64_t));
    region->remote.resize(peers_.size());
    region->remote[me_].bytes = bytes;
    region->remote[me_].at = region->base;
    {
        // Register before the exchange: a peer that has all ranks' cards may write at once, while this rank still waits for a slow peer.
        const std::lock_guard<std::mutex> lock(mutex_);
        region->id = registry_.next_id();
        registry_.add(region);
    }
    try {
        exchange(*region, channels_, me_, gpu_.get(), Clock::now() + settings_.timeout);
    } catch (...) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            registry_.remove(*region);
        }
        // Not under the lock, because unmapping may wait. NCCL never had the handle, so no request names the mappings.
        unmap(*region, gpu_.get());
        throw;
    }
    return region.get();
}

void Comm::remove_memory(void* handle) {
    const std::lock_guard<std::mutex> control(control_);
    const InContext in_context(gpu_.get());
    std::shared_ptr<Region> region;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        region = registry_.by_handle(handle);
        registry_.remove(*region);
        signals_.forget(*region);
    }
    if (region->on_gpu) wait_for_copies();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (region.use_count() > 1) {
            retired_regions_.push_back(std::move(region));  // a request still names it
            return;
        }
    }
    unmap(*region, gpu_.get());  // no longer reachable; not under the lock, because unmapping may wait
}

Context* Comm::add_context(int count) {
    if (count < 1) throw Failure(Fault::kUnsupported, "a context has at least one GIN context");
    auto context = std::make_unique<Context>();
    context->comm = this;
    context->count = count;
    context->lanes.resize(static_cast<size_t>(count) * peers_.size());
    for (size_t i = 0; i < context->lanes.size(); ++i) context->lanes[i].peer = static_cast<int>(i % peers_.size());
    const std::lock_guard<std::mutex> lock(mutex_);
    contexts_.push_back(std::move(context));
    return contexts_.back().get();
}

void Comm::remove_context(Context* context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : contexts_) {
        if (one.get() != context) continue;
        const bool busy = std::any_of(one->lanes.begin(), one->lanes.end(), [](const Lane& lane) { return lane.active; });
        if (busy) retired_contexts_.push_back(std::move(one));
        contexts_.erase(contexts_.begin() + (&one - contexts_.data()));
        return;
    }
    throw Failure(Fault::kBadHandle, "no such context");
}

std::vector<std::pair<CopyStream*, Ticket>> Comm::open_copies() {
    std::vector<std::pair<CopyStream*, Ticket>> open{{&signals_.stream(), signals_.stream().last()}};
    for (Peer& peer : peers_) open.emplace_back(&peer.direct->stream(), peer.direct->stream().last());
    return open;
}

// Wait for the copies under way, so that memory they touch can be given back; throw if they do not end.
void Comm::wait_for_copies() {
    std::vector<std::pair<CopyStream*, Ticket>> open;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        open = open_copies();
    }
    const Deadline deadline = Clock::now() + kLongestCopy;
    for (;;) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (std::all_of(open.begin(), open.end(), [](auto& one) { return one.first->ended(one.second); })) return;
        }
        if (Clock::now() >= deadline) throw Failure(Fault::kCuda, "copies do not end");
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

}  // namespace moecomm::rma
