// Signals are added where they are received: NCCL's signal memory can't be given to another process, and no copy engine adds.
#pragma once
#include <deque>
#include <memory>

#include "copies.h"
#include "region.h"

namespace moecomm::rma {

class Signals {
  public:
    static constexpr size_t kMost = 4096;  // that wait to be written

    Signals(std::shared_ptr<Gpu> gpu, const Registry& registry) : registry_(registry), stream_(gpu), word_(gpu, sizeof(uint64_t)) {}

    bool room() const { return waiting_.size() < kMost; }
    // From `peer`, or from ourselves.  A signal may wait for the copies before it, and longer than its memory is registered: then it is
    // dropped here.  Throws Failure(kPeerLied) if there never was such a word.
    void add(uint32_t id, uint64_t at, uint64_t value, int peer);
    bool progress();                    // whether it wrote any
    void forget(const Region& region);  // it is no longer registered
    CopyStream& stream() { return stream_; }

  private:
    struct Signal {
        std::shared_ptr<Region> region;
        uint64_t at, value;
    };
    bool write(Signal& signal);  // false: not yet

    const Registry& registry_;
    CopyStream stream_;
    Staging word_;  // a word on its way from the GPU and back
    bool reading_ = false;
    Ticket read_ = 0;
    std::deque<Signal> waiting_;
};

}  // namespace moecomm::rma
