// What ranks of different domains put straight to each other: few tokens (protocol/domains.h).
#pragma once
#include <utility>
#include <vector>

#include "../../protocol/domains.h"

namespace moecomm::host {

class Round;
struct Dispatch;
struct Missing;

// What we put in a round.  Used by all threads at once.
class DirectSends {
  public:
    // `parts`: by rank, how many are put there.
    explicit DirectSends(std::vector<i32> parts) : left_(std::move(parts)), any_(left_.size(), 0) {}

    // All of a part has been put to a rank.  After the last it is told so, if any of them has `something` for it.
    void end_part(const Round& r, i32 rank, bool something);

  private:
    std::vector<i32> left_;  // by rank: parts
    std::vector<u8> any_;    // by rank
};

// The tokens that come straight here: every `stride`-th chunk of each of their sources is delivered by this thread, to this rank alone.
class DirectArrivals {
  public:
    DirectArrivals(Dispatch& d, i32 worker, i32 stride);

    // Everything that has come by now.
    void take_come();
    bool any_come() const;
    // Is there a source that has yet to say that all has come?
    bool open() const { return !waiting_.empty(); }
    Missing missing() const;

  private:
    const u64* signal(i32 source) const;
    bool come(i32 source) const;
    void take(i32 source, i32 chunk) const;

    Dispatch& d_;
    const i32 worker_, stride_;
    std::vector<i32> waiting_;  // sources
};

}  // namespace moecomm::host
