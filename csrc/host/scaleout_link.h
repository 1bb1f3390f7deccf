// Puts and signals to ranks of other domains, executed by a background thread.  Stands in for a network on CPU ranks.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../protocol/domains.h"

namespace moecomm::host {

// Puts become visible in any order.  A signal becomes visible after all earlier puts and signals to the same peer.
class Link {
  public:
    // `windows`: by rank, the address of a window of another domain; 0 for ranks of this domain.  `disorder`, for tests: if not 0, the seed
    // of random delays and of a random order among those permitted.
    Link(const Shape& shape, std::vector<u64> windows, u64 disorder = 0);
    ~Link() { close(); }
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // Copy `n` bytes for a put; the source may change after return.  Waits for room at most, which the link's thread makes without waiting.
    void put(i32 peer, u64 offset, const void* bytes, u64 n);
    // Set a signal of the peer to `value` by adding the difference to the last value; this rank must be its only writer.
    void signal(i32 peer, u64 which, u64 value);
    // Wait until everything queued is executed.
    void drain();
    // Forget the last values of all signals: they are 0 again, but for those of tagged words, after `round`.
    void begin_anew(i32 rank, u32 round);
    // Execute everything queued and end the thread.  Idempotent; no put or signal may follow.
    void close();
    // Set the abort word of a peer, if it is not set, at once and ahead of everything queued.
    void abort(i32 peer, u32 word);
    // Set the abort word of a peer, whatever it is.
    void exclude(i32 peer, u32 word);

  private:
    struct Order {
        i32 peer;
        bool is_signal;
        u64 to;        // offset in the peer's window
        u64 first, n;  // put: its bytes in Batch::bytes
        u64 added;     // signal: the summand
    };
    struct Batch {
        std::vector<Order> orders;
        std::vector<u8> bytes;
    };

    void append(const Order& order);
    void serve();
    void move(const Batch& batch);
    void move_disorderly(Batch& batch);
    void execute(const Batch& batch, const Order& order) const;

    const int owner_;  // process id of the process that runs the thread
    const WindowLayout layout_;
    const std::vector<u64> windows_;
    u64 disorder_;
    std::vector<std::vector<u64>> signal_values_;  // by peer and signal: the last value
    // On the heap, because a forked child, which has no such thread, must leak these and not destroy them.
    struct Shared {
        std::mutex mutex;
        std::condition_variable work, room, idle;
    };
    std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
    Batch waiting_;
    bool closing_ = false, moving_ = false;
    std::thread thread_;
};

inline Link& link_of(const Context& ctx) { return *reinterpret_cast<Link*>(ctx.link); }

}  // namespace moecomm::host
