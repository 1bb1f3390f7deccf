// Seeded numbers: the same on every machine, so that a seed is a bug report.
#pragma once
#include <initializer_list>

#include "protocol/compiler.h"

namespace moecomm::test {

class Random {
  public:
    explicit Random(u64 seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}

    u64 next() {  // splitmix64
        u64 z = (state_ += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    // lowest .. highest, both included.
    i32 between(i32 lowest, i32 highest) { return lowest + static_cast<i32>(next() % static_cast<u64>(highest - lowest + 1)); }
    bool once_in(i32 n) { return between(1, n) == 1; }
    i32 one_of(std::initializer_list<i32> values) { return values.begin()[next() % values.size()]; }
    // Mostly near 1, of both signs.
    float value() {
        const float sum = static_cast<float>(between(-2000, 2000) + between(-2000, 2000));
        return sum / 1024.0f + static_cast<float>(between(-99, 99)) / 65536.0f;
    }

  private:
    u64 state_;
};

}  // namespace moecomm::test
