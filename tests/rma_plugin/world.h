// Ranks of one test: processes, or threads of one process; what NCCL's bootstrap does for them; the memory that they register.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "fake_cuda.h"
#include "nccl_abi.h"

namespace abi = moecomm::rma::abi;
using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 8;

struct Options {
    std::string plugin, scenario, variant, mode = "processes";
    int ranks = 2, epochs = 2, contexts = 2, ops = 60, queue = 32, table = 14, seconds = 30;
    int lag = 0;                         // microseconds that rank 1 sleeps after each turn
    uint64_t seed = 1, slice = 1 << 20;  // slice: bytes of a window for one sender and one context
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
    void barrier();
    Shared& shared() { return *shared_; }

  private:
    const Options& options_;
    Shared* shared_;
};

[[noreturn]] void give_up(const std::string& why);  // the test has failed
void require(bool fact, const std::string& what);

constexpr unsigned char kUntouched = 0xee;
char* allocate_window(size_t bytes);   // as NCCL's windows, which can be exported; filled with kUntouched
char* allocate_signals(size_t bytes);  // as NCCL's signals, which can't; zeros

const std::string& logged();  // what the plugin has said so far
void log_line(int level, unsigned long flags, const char* file, int line, const char* format, ...);
bool names(const std::string& one);  // the plugin has said so

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
