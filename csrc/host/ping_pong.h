// Two CPU ranks put bytes into each other's windows in turn, each time with a signal behind them; as csrc/bench/ping_pong.cuh on GPUs.
#pragma once
#include <optional>

#include "../protocol/deadline.h"

namespace moecomm::host {

struct PingPong {
    u64 here, there;  // the blocks in our window and in the peer's: the signal, and kPayload bytes on what is put
    u64 source;       // what we put: `bytes` in our own memory
    i64 bytes;
    u64 before;          // what the signal counts already
    i32 warmup, rounds;  // round trips
    bool starts;
    Deadline deadline;  // of each wait
};

constexpr i32 kPayload = 256;

// Nanoseconds that the timed round trips took; none if the peer did not come, or somebody called it off.
std::optional<u64> ping_pong(const PingPong& p);

}  // namespace moecomm::host
