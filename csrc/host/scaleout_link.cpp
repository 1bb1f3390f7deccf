#include "scaleout_link.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "../protocol/order.h"
#include "during_waits.h"

namespace moecomm::host {

namespace {

constexpr u64 kMostWaiting = 1 << 20;  // bytes queued at most; a larger put waits until the queue is empty

// xorshift64*
u64 next(u64& state) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 0x2545f4914f6cdd1dull >> 33;
}

}  // namespace

Link::Link(const Shape& shape, std::vector<u64> windows, u64 disorder)
    : owner_(getpid()), layout_(window_layout(shape)), windows_(std::move(windows)), disorder_(disorder), signal_values_(windows_.size()) {
    for (size_t p = 0; p < windows_.size(); ++p)
        if (windows_[p] != 0) signal_values_[p].assign(signals(shape), 0);
    thread_ = background_thread([this] { serve(); });
}

void Link::close() {
    if (!thread_.joinable()) return;
    if (getpid() != owner_) {
        thread_.detach();
        static_cast<void>(shared_.release());
        return;
    }
    {
        std::lock_guard<std::mutex> lock(shared_->mutex);
        closing_ = true;
    }
    shared_->work.notify_one();
    thread_.join();
}

void Link::put(i32 peer, u64 offset, const void* bytes, u64 n) {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->room.wait(lock, [&] { return waiting_.bytes.empty() || waiting_.bytes.size() + n <= kMostWaiting; });
    const u64 first = waiting_.bytes.size();
    waiting_.bytes.resize(first + n);
    std::memcpy(waiting_.bytes.data() + first, bytes, n);
    append({peer, false, offset, first, n, 0});
}

void Link::signal(i32 peer, u64 which, u64 value) {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    u64& signaled = signal_values_[peer][which];
    append({peer, true, signal_at(layout_, which), 0, 0, value - signaled});
    signaled = value;
}

// The thread sleeps only while the queue is empty, so only the first entry needs a wakeup.
void Link::append(const Order& order) {
    waiting_.orders.push_back(order);
    if (waiting_.orders.size() == 1) shared_->work.notify_one();
}

void Link::abort(i32 peer, u32 word) { compare_exchange(reinterpret_cast<u32*>(windows_[peer] + layout_.abort), 0, word); }

void Link::exclude(i32 peer, u32 word) { store_release(reinterpret_cast<u32*>(windows_[peer] + layout_.abort), word); }

void Link::drain() {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->idle.wait(lock, [this] { return waiting_.orders.empty() && !moving_; });
}

void Link::begin_anew(i32 rank, u32 round) {
    for (std::vector<u64>& values : signal_values_) {
        if (values.empty()) continue;
        std::fill(values.begin(), values.end(), 0);
        values[tagged_words_signal(rank)] = tagged_words_value(round_tag(round));
    }
}

void Link::serve() {
    Batch batch;
    for (;;) {
        batch.orders.clear();
        batch.bytes.clear();
        {
            std::unique_lock<std::mutex> lock(shared_->mutex);
            moving_ = false;
            if (waiting_.orders.empty()) shared_->idle.notify_all();
            shared_->work.wait(lock, [this] { return closing_ || !waiting_.orders.empty(); });
            if (waiting_.orders.empty()) return;
            std::swap(batch, waiting_);
            moving_ = true;
        }
        shared_->room.notify_all();
        disorder_ != 0 ? move_disorderly(batch) : move(batch);
    }
}

void Link::move(const Batch& batch) {
    for (const Order& order : batch.orders) execute(batch, order);
}

// Execute the batch in a random order, with random delays; a signal only after everything before it to the same peer.
void Link::move_disorderly(Batch& batch) {
    std::vector<Order>& left = batch.orders;
    while (!left.empty()) {
        if (next(disorder_) % 32 == 0) std::this_thread::yield();  // a long delay where ranks outnumber cores
        if (next(disorder_) % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(next(disorder_) % 200));
        const auto chosen = left.begin() + static_cast<i64>(next(disorder_) % left.size());
        const auto same_peer = [&](const Order& earlier) { return earlier.peer == chosen->peer; };
        if (chosen->is_signal && std::any_of(left.begin(), chosen, same_peer)) continue;
        execute(batch, *chosen);
        left.erase(chosen);
    }
}

void Link::execute(const Batch& batch, const Order& order) const {
    u8* to = reinterpret_cast<u8*>(windows_[order.peer] + order.to);
    if (!order.is_signal) {
        std::memcpy(to, batch.bytes.data() + order.first, order.n);
    } else {
        __atomic_fetch_add(reinterpret_cast<u64*>(to), order.added, __ATOMIC_RELEASE);
    }
}

}  // namespace moecomm::host
