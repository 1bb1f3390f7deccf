// DirectPath: asynchronous copies to and from a peer's mapped memory by the copy engines, and copies within this rank.
#pragma once
#include <deque>

#include "copies.h"
#include "request.h"

namespace moecomm::rma {

class DirectPath {
  public:
    static constexpr uint64_t kInlineBytes = 16;  // largest put from host memory to a peer; NCCL's inline values have up to 8

    explicit DirectPath(std::shared_ptr<Gpu> gpu, bool to_ourselves);

    void push(Request& request);
    void progress();
    CopyStream& stream() { return stream_; }

  private:
    bool start(Request& request);  // false: the rest has to start later
    char* reach(const Region& region, uint64_t at, int rank) const { return region.remote[rank].at + at; }

    CopyStream stream_;
    Staging inline_;  // one slot for each copy that the stream has room for
    Staging bounce_;
    bool to_ourselves_;
    std::deque<Request*> waiting_, copying_;
};

}  // namespace moecomm::rma
