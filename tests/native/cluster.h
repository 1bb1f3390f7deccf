// Ranks of one process: a window on the heap for each, and a thread for each while they run.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "host/scaleout_link.h"
#include "protocol/args.h"

namespace moecomm::test {

constexpr u8 kUntouched = 0xa5;  // what outputs hold before anybody writes to them

class Cluster {
  public:
    // `disorder`: seed of the order in which links move, if there are several domains; 0: as asked.
    Cluster(const Shape& shape, u64 timeout_ns, u64 disorder = 0);

    const Shape shape;
    const WindowLayout window;

    Context context(i32 rank) const;
    u8* base(i32 rank) const { return windows_[rank].get(); }
    u32* abort_word(i32 rank) const { return reinterpret_cast<u32*>(base(rank) + window.abort); }
    u32& host_word(i32 rank) { return host_words_[rank]; }  // Context::abort_host
    FailureRecord& record(i32 rank) { return records_[rank]; }
    void clear_records();
    // Offset of `bytes` of untouched output in the window of `rank`, with at least `kGuard` untouched bytes behind it.
    u64 output(i32 rank, u64 bytes);
    static constexpr u64 kGuard = 64;

    // body(rank) on a thread for every rank, at once.
    void run(const std::function<void(i32)>& body) const;

  private:
    struct Free {
        void operator()(u8* p) const;
    };
    const u64 timeout_ns_;
    std::vector<std::unique_ptr<u8, Free>> windows_;
    std::vector<FailureRecord> records_;
    std::vector<u32> host_words_;
    std::vector<u64> used_;
    std::vector<std::unique_ptr<host::Link>> links_;  // with several domains
};

}  // namespace moecomm::test
