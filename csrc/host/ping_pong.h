// Ping-pong of two CPU ranks: each in turn stores bytes and then a signal in the other's window.  csrc/bench/ping_pong.cuh is the GPU form.
#pragma once
#include <optional>

#include "../protocol/deadline.h"

namespace moecomm::host {

struct PingPong {
    u64 here, there;  // addresses of the blocks in this rank's window and the peer's: the signal, and the payload at offset kPayload
    u64 source;       // address of the `bytes` to store
    i64 bytes;
    u64 before;          // value of the signals at the start
    i32 warmup, rounds;  // round trips
    bool starts;         // this rank stores first
    Deadline deadline;   // of each single wait
};

constexpr i32 kPayload = 256;

// Return the nanoseconds of the timed round trips; nullopt on timeout or abort.
std::optional<u64> ping_pong(const PingPong& p);

}  // namespace moecomm::host
