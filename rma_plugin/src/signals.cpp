#include "signals.h"

#include <algorithm>
#include <cstring>

#include "times.h"

namespace moecomm::rma {

void Signals::add(uint32_t id, uint64_t at, uint64_t value, int peer) {
    if (registry_.is_removed(id)) return;
    std::shared_ptr<Region> region = registry_.by_id(id);
    if (region == nullptr || at % sizeof(uint64_t) != 0 || !fits(at, sizeof(uint64_t), region->bytes)) {
        throw Failure(Fault::kPeerLied, rank_name(peer) + " signals a word that is not in any registered region");
    }
    waiting_.push_back({std::move(region), at, value});
}

bool Signals::progress() {
    if (waiting_.empty()) return false;
    times::Writing writing;
    const size_t before = waiting_.size();
    for (; !waiting_.empty() && write(waiting_.front()); waiting_.pop_front()) writing.wrote();
    return waiting_.size() < before;
}

bool Signals::write(Signal& signal) {
    Region& region = *signal.region;
    char* word = region.base + signal.at;
    if (!region.on_gpu) {
        __atomic_fetch_add(reinterpret_cast<uint64_t*>(word), signal.value, __ATOMIC_RELEASE);
        return true;
    }
    stream_.idle();  // makes room
    if (!stream_.room()) return false;
    if (region.never_reset) {
        region.shadow[signal.at / sizeof(uint64_t)] += signal.value;
        write_shadow(region, signal.at / sizeof(uint64_t));
        return true;
    }
    // A word of the user's window, which kernels may write between signals: read, add, write.
    if (!reading_) {
        read_ = stream_.copy(word_.get(), word, sizeof(uint64_t), true);
        reading_ = true;
    }
    if (!stream_.ended(read_)) return false;
    uint64_t now;
    std::memcpy(&now, word_.get(), sizeof now);
    stream_.write_word(word, now + signal.value);
    reading_ = false;
    return true;
}

// A copy engine writes the word together with a neighbor, which keeps its value (Gpu::copy). Each of the two is a row of the copy, so a
// kernel never sees half of it.
void Signals::write_shadow(const Region& region, size_t word) {
    if (region.shadow.size() < 2) {
        stream_.write_word(region.base + word * sizeof(uint64_t), region.shadow[word]);
        return;
    }
    const size_t first = std::min(word, region.shadow.size() - 2);
    char* pair = pairs_.get() + (stream_.last() + 1) % CopyStream::kRoom * kPair;
    std::memcpy(pair, &region.shadow[first], kPair);
    stream_.copy(region.base + first * sizeof(uint64_t), pair, kPair, true);
}

void Signals::forget(const Region& region) {
    if (!waiting_.empty() && waiting_.front().region.get() == &region) reading_ = false;
    std::deque<Signal> kept;
    for (Signal& signal : waiting_) {
        if (signal.region.get() != &region) kept.push_back(std::move(signal));
    }
    waiting_.swap(kept);
}

}  // namespace moecomm::rma
