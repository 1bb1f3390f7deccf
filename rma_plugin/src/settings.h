// Settings from the environment, the only channel that NCCL offers. No other file of the plugin reads the environment.
#pragma once
#include <chrono>
#include <string>

namespace moecomm::rma {

struct Settings {
    std::string job;                               // MOECOMM_RMA_JOB: the name under which a communicator is watched (losses.h)
    std::chrono::milliseconds timeout{60 * 1000};  // MOECOMM_RMA_TIMEOUT_MS: limit for connecting, and for silence
    bool times = false;                            // MOECOMM_RMA_TIMES=1: see times.h
};

Settings read_settings();  // throws Failure for an unknown value

}  // namespace moecomm::rma
