// Ranks of one test: processes, or threads of one process; what NCCL's bootstrap does for them; the memory that they register.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "nccl_abi.h"

namespace abi = moecomm::rma::abi;
using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 8;

struct Options {
    std::string plugin, scenario, memory = "host", mode = "processes", way;
    int ranks = 2, epochs = 2, contexts = 2, ops = 60, queue = 32, table = 14, seconds = 30;
    int lag = 0;                         // microseconds that rank 1 sleeps after each turn
    int mixed = 0;                       // 1: rank 0 is reached over tcp alone
    uint64_t seed = 1, slice = 1 << 20;  // slice: bytes of a window for one sender and one context
    bool cuda() const { return memory == "cuda"; }
};

struct Shared {  // between the ranks
    unsigned char handles[kMostRanks][abi::kHandleBytes];
    std::atomic<int> arrived, turn;
    std::atomic<uint64_t> sent[kMostRanks][kMostRanks];  // from a rank, to a rank
};

class World {
  public:
    World(const Options& options);
    // Each rank runs `body`; true if all return true in time.  A rank may be expected to die.
    bool run(const std::function<bool(int rank)>& body, int expected_to_die = -1);
    void barrier(int ranks = 0);  // of that many; 0: of all
    Shared& shared() { return *shared_; }

  private:
    const Options& options_;
    Shared* shared_;
};

[[noreturn]] void give_up(const std::string& why);  // the test has failed
void require(bool fact, const std::string& what);

enum class Sharing { kWindow, kPrivate };                               // as NCCL's windows, as NCCL's signals
char* allocate(const Options& options, size_t bytes, Sharing sharing);  // filled with kUntouched, or zeros if private
void use_cuda_on_this_thread(const Options& options);

// For the fake driver: calls that may wait are errors on the calling thread, and elsewhere wait until this thread goes on.
class AsNcclThread {
  public:
    explicit AsNcclThread(const Options& options);
    ~AsNcclThread();
    AsNcclThread(const AsNcclThread&) = delete;
    AsNcclThread& operator=(const AsNcclThread&) = delete;

  private:
    const bool cuda_;
};
// Copies of this process, with memory=cuda.
void hold_copies(bool hold);  // while they are held none ends
int open_copies();            // behind which an event has been recorded that has not ended
int mapped_windows();

constexpr unsigned char kUntouched = 0xee;

const std::string& logged();  // what the plugin has said so far
void log_line(int level, unsigned long flags, const char* file, int line, const char* format, ...);

inline uint64_t mix(uint64_t value) {
    value += 0x9e3779b97f4a7c15ull;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ value >> 27) * 0x94d049bb133111ebull;
    return value ^ value >> 31;
}
class Random {
  public:
    explicit Random(uint64_t seed) : state_(mix(seed)) {}
    uint64_t next() { return mix(state_++); }
    uint64_t below(uint64_t limit) { return next() % limit; }

  private:
    uint64_t state_;
};
