// Model of NCCL's GIN proxy (gin_host_proxy.cc) for a plugin, without NCCL: queues of operations for each context and peer, filled by the
// test as a kernel would, and one thread that takes them, at most one for each peer in a turn, polls those under way, and calls
// rmaProgress.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "table.h"
#include "times.h"
#include "world.h"

struct Operation {
    enum Kind { kPut, kPutInline, kGet, kFlush, kSignal } kind = kPut;
    void *from = nullptr, *to = nullptr;  // regions; of a get: `to` is ours
    uint64_t from_at = 0, to_at = 0, bytes = 0;
    uint64_t value = 0;  // of an inline put
    void* signal = nullptr;
    uint64_t signal_at = 0, signal_value = 0;
    uint32_t signal_op = 0;
    bool strong = true;
};

class Proxy {
  public:
    Proxy(const Options& options, World& world, int rank);
    ~Proxy();
    Proxy(const Proxy&) = delete;
    Proxy& operator=(const Proxy&) = delete;

    void listen();  // publish the handle, and wait until all have
    abi::Result connect();
    void open_contexts();  // createContext, the inline values, and the thread unless it is not wanted
    void start();
    void* add(char* memory, size_t bytes, uint64_t flags = 0, int type = abi::kPtrCuda);
    void remove(void* region);
    void* add_context(int count);
    void add_in_passing(char* memory, size_t bytes);  // memory and a context come and go while the thread is at work
    void close();

    void post(int context, int peer, const Operation& operation);  // waits for a place in the queue
    bool wait_all();                                               // that everything is done; false: the thread has failed
    abi::Result result() const { return static_cast<abi::Result>(result_.load()); }
    bool last_error();
    double longest_call() const { return longest_call_; }  // seconds, on the thread
    void print_times() const;                              // what was posted, and what the plugin has added up

    const Table table;
    void *comm = nullptr, *rma = nullptr;

  private:
    struct State {
        Operation operation;
        void* request;
        int done;
    };
    struct Queue {  // of one context to one peer
        std::vector<State> states;
        std::atomic<uint32_t> posted{0}, done{0};
        uint32_t seen = 0;
        void* inlines_region = nullptr;
        std::unique_ptr<uint64_t[]> inlines;
    };
    void run();
    abi::Result turn();
    abi::Result issue(int context, int peer, Queue& queue, State& state, uint32_t place);
    struct Calls {  // of a kind, and nanoseconds in them
        uint64_t count = 0, time = 0;
    };
    template <class Call>
    abi::Result timed(Calls& calls, const Call& call);

    const Options& options_;
    World& world_;
    const int rank_;
    void *context_ = nullptr, *listener_ = nullptr;
    std::vector<Queue> queues_;
    std::vector<void*> regions_;
    std::thread thread_;
    std::atomic<bool> stop_{false};
    std::atomic<int> result_{0};
    double longest_call_ = 0;
    uint64_t posted_ = 0, signals_ = 0, bytes_ = 0;
    Calls issues_, polls_;
    int (*take_times_)(moecomm::rma::times::Taken*) = nullptr;
};
