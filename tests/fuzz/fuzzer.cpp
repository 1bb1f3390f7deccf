// A coverage-guided fuzzer for g++, which has no libFuzzer.
//
//   fuzzer replay CORPUS                      every line
//   fuzzer fuzz CORPUS INPUTS SEED [FOUND]    that many inputs, made of lines; appends those that reach new code to FOUND
//   fuzzer minimize CORPUS                    prints a subset that reaches the same code
//
// A corpus is a text file, an input a line in hexadecimal digits.  Exit status 1: the last input, which is printed, broke something.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <random>
#include <string>

#include "input.h"

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kEdges = 1 << 16, kMostBytes = 1024;
constexpr unsigned kLongest = 10;  // seconds for one input

uint8_t reached[kEdges];         // by the input that runs
uint8_t ever_reached[kEdges];    // and, by a bit of the count's logarithm, by any before
thread_local uintptr_t last_pc;  // of this thread: parsers may have several

struct Running {  // shared with the parent, which outlives a crash
    size_t bytes;
    uint64_t inputs, kept;
    uint8_t data[kMostBytes];
};
Running* running;

uint8_t size_class(uint8_t count) { return static_cast<uint8_t>(count < 4 ? 1u << (count - 1) : count < 16 ? 8 : count < 128 ? 16 : 32); }

// Run an input. Return true if it reached new code, or some code more often than any input before.
bool run(const Bytes& input) {
    running->bytes = input.size();
    std::copy(input.begin(), input.end(), running->data);
    ++running->inputs;
    std::memset(reached, 0, sizeof reached);
    ::alarm(kLongest);
    const int free_fd = ::dup(0);
    ::close(free_fd);
    // An allocation of its own, so that AddressSanitizer sees reads beyond the end.
    parse(Bytes(input).data(), input.size());
    const int still_free = ::dup(0);
    ::close(still_free);
    require(still_free == free_fd, "no descriptor stays open");
    bool found = false;
    for (size_t i = 0; i < kEdges; ++i) {
        if (reached[i] == 0) continue;
        const uint8_t size = size_class(reached[i]);
        found = found || (ever_reached[i] & size) == 0;
        ever_reached[i] |= size;
    }
    return found;
}

std::string hex(const uint8_t* data, size_t bytes) {
    std::string text;
    for (size_t i = 0; i < bytes; ++i) {
        text += "0123456789abcdef"[data[i] >> 4];
        text += "0123456789abcdef"[data[i] & 15];
    }
    return text;
}

std::vector<Bytes> read_corpus(const char* path) {
    std::ifstream file(path);
    require(file.good(), "the corpus can be read");
    std::vector<Bytes> corpus;
    for (std::string line; std::getline(file, line);) {
        if (line.empty() || line[0] == '#') continue;
        Bytes input;
        for (size_t i = 0; i + 1 < line.size(); i += 2) input.push_back(static_cast<uint8_t>(std::stoi(line.substr(i, 2), nullptr, 16)));
        require(input.size() <= kMostBytes, "an input is short");
        corpus.push_back(std::move(input));
    }
    return corpus;
}

class Mutator {
  public:
    Mutator(uint64_t seed, const std::vector<Bytes>& corpus) : random_(seed), corpus_(corpus) {}

    Bytes next() {
        // Late finds more often: they are the deepest.
        const size_t n = corpus_.size();
        Bytes input = corpus_[below(2) == 0 ? n - 1 - below(std::min<size_t>(n, 16)) : below(n)];
        for (size_t edits = 1 + below(4); edits > 0; --edits) edit(input);
        if (input.size() > kMostBytes) input.resize(kMostBytes);
        return input;
    }

  private:
    size_t below(size_t limit) { return random_() % limit; }

    void edit(Bytes& input) {
        static constexpr uint64_t kLimits[] = {0, 1, 7, 8, 16, 63, 64, 65, 127, 128, 255, 256, 0x7fffffff, 0x80000000, ~0ull, ~0ull - 7};
        const size_t at = input.empty() ? 0 : below(input.size());
        const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
        const size_t run = input.empty() ? 0 : std::min(1 + below(32), input.size() - at);
        const auto end = place + static_cast<std::ptrdiff_t>(run);
        switch (below(8)) {
            case 0:
                if (run > 0) input[at] = static_cast<uint8_t>(input[at] ^ 1u << below(8));
                break;
            case 1:
                if (run > 0) input[at] = static_cast<uint8_t>(random_());
                break;
            case 2:
                if (run > 0) input[at] = static_cast<uint8_t>(input[at] + below(17) - 8);
                break;
            case 3: {  // a number at the limit of some range
                const uint64_t value = kLimits[below(sizeof kLimits / sizeof kLimits[0])];
                const size_t bytes = std::min<size_t>(size_t{1} << below(4), input.size() - at);
                if (bytes > 0) std::memcpy(&input[at], &value, bytes);
                break;
            }
            case 4: {
                Bytes some(1 + below(16));
                for (uint8_t& byte : some) byte = below(2) == 0 ? 0 : static_cast<uint8_t>(random_());
                input.insert(place, some.begin(), some.end());
                break;
            }
            case 5:
                input.erase(place, end);
                break;
            case 6: {
                const Bytes some(place, end);
                input.insert(place, some.begin(), some.end());
                break;
            }
            case 7: {  // the rest of another input
                const Bytes& other = corpus_[below(corpus_.size())];
                input.erase(place, input.end());
                if (!other.empty())
                    input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size())), other.end());
                break;
            }
        }
    }

    std::mt19937_64 random_;
    const std::vector<Bytes>& corpus_;
};

int replay(const std::vector<Bytes>& corpus) {
    for (const Bytes& input : corpus) run(input);
    return 0;
}

int fuzz(std::vector<Bytes> corpus, uint64_t inputs, uint64_t seed, const char* found) {
    replay(corpus);
    if (corpus.empty()) corpus.push_back({});
    Mutator mutator(seed, corpus);
    for (; inputs > 0; --inputs) {
        Bytes input = mutator.next();
        if (!run(input)) continue;
        ++running->kept;
        if (found != nullptr) std::ofstream(found, std::ios::app) << hex(input.data(), input.size()) << '\n';
        corpus.push_back(std::move(input));
    }
    return 0;
}

int minimize(std::vector<Bytes> corpus) {
    std::stable_sort(corpus.begin(), corpus.end(), [](const Bytes& a, const Bytes& b) { return a.size() < b.size(); });
    for (const Bytes& input : corpus)
        if (run(input)) std::cout << hex(input.data(), input.size()) << '\n';
    std::cout.flush();
    return 0;
}

}  // namespace

// g++ calls it at every edge of what is compiled with -fsanitize-coverage=trace-pc.
extern "C" void __sanitizer_cov_trace_pc() {
    const auto pc = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    uint8_t& count = reached[(pc ^ last_pc << 5) % kEdges];
    if (count != 255) ++count;
    last_pc = pc;
}

int main(int count, char** words) {
    const std::string command = count > 2 ? words[1] : "";
    if (command != "replay" && command != "minimize" && !(command == "fuzz" && count > 4)) return 2;
    void* shared = ::mmap(nullptr, sizeof(Running), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(shared != MAP_FAILED, "memory is shared");
    running = static_cast<Running*>(shared);
    const pid_t child = ::fork();
    if (child == 0) {
        const std::vector<Bytes> corpus = read_corpus(words[2]);
        if (command == "replay") return replay(corpus);
        if (command == "minimize") return minimize(corpus);
        return fuzz(corpus, std::strtoull(words[3], nullptr, 10), std::strtoull(words[4], nullptr, 10), count > 5 ? words[5] : nullptr);
    }
    int status = 0;
    require(child > 0 && ::waitpid(child, &status, 0) == child, "there is a process to run inputs");
    std::cerr << running->inputs << " inputs, " << running->kept << " reached new code\n";
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
    std::cerr << (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? "never ended: " : "broke: ") << hex(running->data, running->bytes)
              << '\n';
    return 1;
}
