// A fuzzer's input, read from front to back.  Past its end everything is 0.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

class Input {
  public:
    Input(const uint8_t* data, size_t bytes) : at_(data), end_(data + bytes) {}

    bool empty() const { return at_ == end_; }
    size_t left() const { return static_cast<size_t>(end_ - at_); }
    uint8_t byte() { return take<uint8_t>(); }
    template <class T>
    T take() {
        T value{};
        const size_t bytes = std::min(sizeof value, left());
        if (bytes > 0) std::memcpy(&value, at_, bytes);
        at_ += bytes;
        return value;
    }
    std::vector<uint8_t> bytes(size_t most) {
        const size_t count = std::min(most, left());
        std::vector<uint8_t> some(at_, at_ + count);
        at_ += count;
        return some;
    }

  private:
    const uint8_t *at_, *end_;
};

inline void require(bool fact, const char* what) {
    if (fact) return;
    std::fprintf(stderr, "violated: %s\n", what);
    std::abort();
}

void parse(const uint8_t* data, size_t bytes);  // parsers.cpp: one input, to the parser that its first byte names
