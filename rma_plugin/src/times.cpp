#include "times.h"

#include <chrono>

namespace moecomm::rma::times {
namespace {

std::atomic<uint64_t> sums[kSums], since{0};
thread_local bool posting = false;
thread_local uint64_t in_driver = 0;

}  // namespace

uint64_t now() {
    add(kClockReads, 1);
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
}

void add(Sum sum, uint64_t value) { sums[sum].fetch_add(value, std::memory_order_relaxed); }

void enable() {
    if (!on.exchange(true)) since = now();
}

int take(Taken* to) {
    if (to->version != kVersion) return 1;
    to->on = enabled() ? 1 : 0;
    to->since = 0;
    if (to->on != 0) {
        const uint64_t time = now();
        to->since = time - since.exchange(time);
    }
    for (int i = 0; i < kSums; ++i) to->sums[i] = sums[i].exchange(0, std::memory_order_relaxed);
    return 0;
}

void Mark::end() {
    const uint64_t time = now();
    add(kEnded, 1);
    add(kUntilEnded, time - begin);
    if (--open->count == 0) add(kBusy, time - open->since);
    ++open->ended;
    open = nullptr;
}

void Post::begin() {
    begin_ = now();
    posting = true;
    in_driver = 0;
}

Mark Post::accepted(uint64_t bytes, bool signals, Open& open) {
    accepted_ = true;
    add(kOperations, 1);
    add(kSignals, signals ? 1 : 0);
    add(kBytes, bytes);
    if (open.count++ == 0) open.since = begin_;
    return {&open, begin_};
}

void Post::end() {
    posting = false;
    if (!accepted_) return;
    add(kPosting, now() - begin_);
    add(kDriver, in_driver);
}

void Driver::begin() {
    if (posting) begin_ = now();
}

void Driver::end() { in_driver += now() - begin_; }

void Poll::end() {
    add(kPolls, 1);
    add(kEmptyPolls, found_ ? 0 : 1);
    add(kPolling, now() - begin_);
}

void Writing::end() {
    add(kWords, words_);
    add(kWriting, now() - begin_);
}

}  // namespace moecomm::rma::times
