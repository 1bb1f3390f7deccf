// Comm: one NCCL communicator: its registered memory, its paths to the other ranks, and the operations under way.
// Calls that may wait for other ranks run on NCCL callers' threads and hold control_. Calls of NCCL's progress thread never wait: they hold
// mutex_ for their own data, and no thread holds mutex_ while it waits.
#pragma once
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "direct.h"
#include "exchange.h"
#include "settings.h"
#include "signals.h"

namespace moecomm::rma {

class Comm;

// Operations of one GIN context to one peer, in order: a signal leaves when all operations before it have ended.
struct Lane {
    int peer = 0;
    bool active = false;
    std::deque<Request*> requests;
};

struct Context {
    Comm* comm;
    int count;
    std::vector<Lane> lanes;  // by context, then by peer
};

struct Move {  // operands of a put or get, in NCCL's terms
    void* local;
    uint64_t local_at;
    void* remote;
    uint64_t remote_at;
    uint64_t bytes;
};
struct Raise {  // the signal that follows a put
    void* region;
    uint64_t at, value;
};

class Comm {
  public:
    Comm(std::vector<Channel> channels, int me, const Settings& settings, std::shared_ptr<Gpu> gpu);
    ~Comm();

    // Called on threads of NCCL's callers.
    void* add_memory(void* data, size_t bytes, bool on_gpu, uint64_t flags);  // collective
    void remove_memory(void* handle);
    Context* add_context(int count);
    void remove_context(Context* context);

    // Called on NCCL's progress thread.
    Request* put(Context& context, int number, int peer, const Move& move, const Raise* raise);
    Request* get(Context& context, int number, int peer, const Move& move);
    Request* flush();
    bool test(Request* request);
    void progress();
    bool failed();

    std::shared_ptr<Gpu> gpu() const { return gpu_; }

  private:
    struct Peer {
        int socket = -1;  // of its channel; closed for this rank itself
        std::unique_ptr<DirectPath> direct;
        std::unique_ptr<Mailbox> to, from;  // null for this rank itself
        std::vector<Lane*> lanes;           // those with requests
        std::optional<Failure> failure;
        bool dropped = false;                         // failed while watched: puts to it complete without effect
        std::optional<Clock::time_point> full_since;  // since when the mailbox `to` is full
        size_t open = 0;                              // open requests
        bool left = false;                            // has closed the communicator
        bool hung_up = false;                         // its connection has ended
    };

    void check_peer(int peer) const;
    Request& open_request(Context& context, int number, int peer, Request::Kind kind, const Move& move);
    void submit(Request& request, Context& context, int number);
    void close_request(Request& request);
    bool progress_all();  // with mutex_ held; true if a signal was written here or a timed operation ended
    void progress_peer(int rank, Clock::time_point now);
    void progress_lane(Peer& peer, Lane& lane, Clock::time_point now);
    bool raise(Peer& peer, Request& request, Clock::time_point now);
    void fail(int rank, Failure failure);
    void wait_for_copies();
    std::vector<std::pair<CopyStream*, Ticket>> open_copies();

    const int me_;
    const Settings settings_;
    const std::shared_ptr<Gpu> gpu_;

    std::mutex control_;
    std::vector<Channel> channels_;

    std::mutex mutex_;
    Registry registry_;
    Signals signals_;
    std::vector<Peer> peers_;
    Descriptor epoll_;
    std::vector<std::unique_ptr<Context>> contexts_, retired_contexts_;
    std::vector<std::shared_ptr<Region>> retired_regions_;  // mappings that may still be in use
    std::deque<Request> requests_;
    std::vector<Request*> free_, released_;
    Request dropped_;            // stands for every put to a dropped peer
    std::deque<Request*> gets_;  // in order, until they have ended
    uint64_t gets_issued_ = 0, gets_ended_ = 0;
    std::optional<Failure> first_failure_;
    times::Open timed_;
    Clock::time_point progressed_{};
};

}  // namespace moecomm::rma
