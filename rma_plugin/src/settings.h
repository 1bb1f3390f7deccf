// Settings from the environment, the only channel that NCCL offers. No other file of the plugin reads the environment.
#pragma once
#include <chrono>
#include <string>

namespace moecomm::rma {

constexpr size_t kShortestSecret = 16;  // bytes; moecomm/config.py has the same bound

enum class Way { kAuto, kLoopback, kTcp };

struct Settings {
    Way way = Way::kAuto;                          // MOECOMM_RMA=auto|loopback|tcp
    std::string secret;                            // MOECOMM_JOB_SECRET: required by tcp, the same on all ranks; empty: none
    std::string address;                           // MOECOMM_RMA_ADDRESS: IPv4 address to listen at; empty: the first interface that is up
    std::chrono::milliseconds timeout{60 * 1000};  // MOECOMM_RMA_TIMEOUT_MS: limit for connecting, and for silence
    bool times = false;                            // MOECOMM_RMA_TIMES=1: see times.h
};

Settings read_settings();  // throws Failure for an unknown value

}  // namespace moecomm::rma
