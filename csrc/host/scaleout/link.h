// How a rank reaches ranks of other domains: puts and signals, moved by a thread of its own.
#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../../protocol/domains.h"

namespace moecomm::host {

// Puts become visible in any order.  A signal becomes visible after all puts and signals to the same peer before it.
class Link {
  public:
    // Windows that loads and stores of this rank do not reach, by rank; 0: another way leads there.  `disorder`, if not 0, is the seed of
    // delays and of an order as bad as it may be: for tests.
    Link(const Shape& shape, std::vector<u64> windows, u64 disorder = 0);
    ~Link() { close(); }
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // Copies: the bytes may change when this returns.  Waits for the link's thread at most, which waits for nobody.
    void put(i32 peer, u64 offset, const void* bytes, u64 n);
    // Makes a signal of the peer, whose only writer this rank is, `value`: adds what it lacks.
    void signal(i32 peer, u64 which, u64 value);
    // Moves what was given to it, and ends its thread.  Idempotent; nothing may be put afterwards.
    void close();
    // At once, ahead of what waits: sets the abort word of a peer, if it is not set.
    void abort(i32 peer, u32 word);

  private:
    struct Order {
        i32 peer;
        bool is_signal;
        u64 to;        // offset in the peer's window
        u64 first, n;  // of a put: its bytes in Batch::bytes
        u64 added;     // of a signal
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

    const int owner_;  // the process that has the thread
    const WindowLayout layout_;
    const std::vector<u64> windows_;
    u64 disorder_;
    std::vector<std::vector<u64>> signal_values_;  // by peer and signal: its value
    // Apart, because a forked child, which has no such thread, must not end what the thread waits for.
    struct Shared {
        std::mutex mutex;
        std::condition_variable work, room;
    };
    std::unique_ptr<Shared> shared_ = std::make_unique<Shared>();
    Batch waiting_;
    bool closing_ = false;
    std::thread thread_;
};

inline Link& link_of(const Context& ctx) { return *reinterpret_cast<Link*>(ctx.link); }

}  // namespace moecomm::host
