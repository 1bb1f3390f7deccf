// Signals: the receiving process adds them, because NCCL's signal memory cannot be exported and no copy engine adds.
#pragma once
#include <deque>
#include <memory>

#include "copies.h"
#include "region.h"

namespace moecomm::rma {

class Signals {
  public:
    static constexpr size_t kMost = 4096;  // signals that wait to be written

    Signals(std::shared_ptr<Gpu> gpu, const Registry& registry)
        : registry_(registry), stream_(gpu), word_(gpu, sizeof(uint64_t)), pairs_(gpu, CopyStream::kRoom * kPair) {}

    bool room() const { return waiting_.size() < kMost; }
    // Queue a signal of `peer` or of this rank. Signals wait for earlier copies; one that outlives the registration of its memory is
    // dropped. Throws Failure(kPeerLied) if there never was such a word.
    void add(uint32_t id, uint64_t at, uint64_t value, int peer);
    bool progress();                    // true if it wrote any
    void forget(const Region& region);  // drop signals for a deregistered region
    CopyStream& stream() { return stream_; }

  private:
    struct Signal {
        std::shared_ptr<Region> region;
        uint64_t at, value;
    };
    static constexpr size_t kPair = 2 * sizeof(uint64_t);
    bool write(Signal& signal);  // false: not yet possible
    void write_shadow(const Region& region, size_t word);

    const Registry& registry_;
    CopyStream stream_;
    Staging word_;   // a word on its way from the GPU and back
    Staging pairs_;  // pairs of words on their way to the GPU, by their place in stream_
    bool reading_ = false;
    Ticket read_ = 0;
    std::deque<Signal> waiting_;
};

}  // namespace moecomm::rma
