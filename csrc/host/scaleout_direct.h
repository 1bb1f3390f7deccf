// Direct sends of few tokens between ranks of different domains, without a forwarder (protocol/domains.h).
#pragma once
#include <utility>
#include <vector>

#include "../protocol/domains.h"

namespace moecomm::host {

class Round;
struct Dispatch;
struct Missing;

// The direct sends of this rank in one round.  All threads of the rank may call concurrently.
class DirectSends {
  public:
    // `parts`: by rank, the number of parts (chunks) to end.
    explicit DirectSends(std::vector<i32> parts) : left_(std::move(parts)), any_(left_.size(), 0) {}

    // End a part: all its puts to `rank` have been issued.  The last part signals `rank`, if any part put `something` there.
    void end_part(const Round& r, i32 rank, bool something);

  private:
    std::vector<i32> left_;  // by rank: open parts
    std::vector<u8> any_;    // by rank: 1 if something was put there
};

// Direct tokens of other domains.  This thread delivers every `stride`-th chunk of each of their source ranks, to this rank alone.
class DirectArrivals {
  public:
    DirectArrivals(Dispatch& d, i32 worker, i32 stride);

    // Deliver the chunks of all source ranks that have signaled; does not wait.
    void take_arrived();
    bool any_arrived() const;
    // True if a source rank has not signaled yet.
    bool open() const { return !waiting_.empty(); }
    Missing missing() const;

  private:
    const u64* signal(i32 source) const;
    bool arrived(i32 source) const;
    void take(i32 source, i32 chunk) const;

    Dispatch& d_;
    const i32 worker_, stride_;
    std::vector<i32> waiting_;  // source ranks that have not signaled
};

}  // namespace moecomm::host
