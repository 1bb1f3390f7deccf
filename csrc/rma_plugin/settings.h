// The only file of the plugin that reads the environment: NCCL has no other way to hand settings to it.
#pragma once
#include <chrono>
#include <string>

namespace moecomm::rma {

constexpr size_t kShortestSecret = 16;  // bytes; moecomm/config.py has the same bound

enum class Way { kAuto, kLoopback, kTcp };

struct Settings {
    Way way = Way::kAuto;                          // MOECOMM_RMA=auto|loopback|tcp
    std::string secret;                            // MOECOMM_JOB_SECRET: tcp wants one, the same on all ranks; empty: none
    std::string address;                           // MOECOMM_RMA_ADDRESS: the IPv4 address to listen at; empty: the first that is up
    std::chrono::milliseconds timeout{60 * 1000};  // MOECOMM_RMA_TIMEOUT_MS: to connect, and until silence is an error
    bool times = false;                            // MOECOMM_RMA_TIMES=1: see times.h
};

Settings read_settings();  // throws Failure for a value that it does not know

}  // namespace moecomm::rma
