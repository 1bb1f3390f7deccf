// Ranks that are threads of one program, without Python: puts, signals and barriers for ThreadSanitizer. Exit code 1 for wrong bytes.
#include <moecomm/window.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using moecomm::CoopThread;
using moecomm::Window;

namespace {

constexpr int kRanks = 3, kWords = 100, kTurns = 400;
constexpr unsigned long long kBytes = kWords * sizeof(long);
volatile unsigned long long bytes = kBytes;  // so that the copy is a call, which ThreadSanitizer sees

struct Rank {
    void* memory;
    moecomm::FailureRecord record{};
    unsigned abort = 0;
    Window window{};
};

// Each rank puts to the next one, which checks what has come; every tenth turn all meet as well.
bool run(const Window& w) {
    const CoopThread thread;
    const int next = (w.rank + 1) % kRanks, last = (w.rank + kRanks - 1) % kRanks;
    std::vector<long> row(kWords);
    for (int turn = 1; turn <= kTurns; ++turn) {
        for (int i = 0; i < kWords; ++i) row[i] = turn * 1000 + w.rank * 100000000L + i;
        w.put_signal(thread, next, 0, row.data(), bytes, 0, 1);
        if (!w.wait(thread, 0, turn, last)) return false;
        for (int i = 0; i < kWords; ++i)
            if (w.local<long>()[i] != turn * 1000 + last * 100000000L + i) return false;
        w.signal(last, 1);  // its place may be written again
        if (!w.wait(thread, 1, turn, next)) return false;
        if (turn % 10 == 0 && !w.barrier(thread, turn % 7)) return false;
    }
    return true;
}

}  // namespace

int main() {
    std::vector<Rank> ranks(kRanks);
    std::vector<unsigned long long> table;
    for (int r = 0; r < kRanks; ++r) {
        Window& w = ranks[r].window;
        moecomm::lay_out(w, r, kRanks, 8, kBytes);
        ranks[r].memory = std::calloc(1, w.bytes + 128);
        table.push_back(moecomm::align_up(reinterpret_cast<unsigned long long>(ranks[r].memory), 128ull));
    }
    std::vector<std::thread> threads;
    std::vector<char> fine(kRanks);
    for (int r = 0; r < kRanks; ++r) {
        Window& w = ranks[r].window;
        w.peers = w.control = reinterpret_cast<unsigned long long>(table.data());
        w.record = reinterpret_cast<unsigned long long>(&ranks[r].record);
        w.abort_host = reinterpret_cast<unsigned long long>(&ranks[r].abort);
        w.timeout_ns = 60'000'000'000ull;
        threads.emplace_back([&fine, &w, r] { fine[r] = run(w); });
    }
    for (std::thread& thread : threads) thread.join();
    for (Rank& rank : ranks) std::free(rank.memory);
    for (const char one : fine)
        if (!one) return std::puts("a rank has failed"), 1;
    return 0;
}
