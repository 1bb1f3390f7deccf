// Copies straight to and from a peer's memory, where we have it mapped, by the copy engines; and those within this rank.
#pragma once
#include <deque>

#include "copies.h"
#include "request.h"

namespace moecomm::rma {

class DirectPath {
  public:
    static constexpr uint64_t kInlineBytes = 16;  // from host memory; NCCL's inline values have up to 8

    explicit DirectPath(std::shared_ptr<Gpu> gpu, bool to_ourselves);

    bool carries(const Request& request) const;
    void push(Request& request);
    void progress();
    size_t unfinished() const { return waiting_.size() + copying_.size(); }
    CopyStream& stream() { return stream_; }

  private:
    bool start(Request& request);  // false: there is more of it to start later
    char* reach(const Region& region, uint64_t at, int rank) const { return region.remote[rank].at + at; }

    CopyStream stream_;
    Staging inline_;  // a slot for each copy that the stream has room for
    Staging bounce_;
    bool to_ourselves_;
    std::deque<Request*> waiting_, copying_;
};

}  // namespace moecomm::rma
