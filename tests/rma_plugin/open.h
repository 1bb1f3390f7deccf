// A rank that is connected, with a window and signals registered; and what the plugin has said.
#pragma once
#include <cstdio>
#include <string>

#include "proxy.h"

constexpr uint64_t kWindowBytes = 1 << 20;
constexpr auto kLong = std::chrono::seconds(20);
constexpr double kBlocked = 0.5;  // seconds; the timeouts of these tests are longer

struct Open {
    Proxy proxy;
    char* window = nullptr;
    void *window_region = nullptr, *signals_region = nullptr;

    Open(const Options& options, World& world, int rank) : proxy(options, world, rank) {
        require(proxy.listen() == abi::kSuccess, "listen: " + logged());
        world.barrier();
        require(proxy.connect() == abi::kSuccess, "connect: " + logged());
        proxy.open_contexts();
        window = allocate(options, kWindowBytes, Sharing::kWindow);
        window_region = proxy.add(window, kWindowBytes);
        signals_region = proxy.add(allocate(options, 4096, Sharing::kPrivate), 4096, 1 | abi::kSignalNeverReset);
    }
    Operation put(uint64_t bytes) const {
        Operation operation;
        operation.from = operation.to = window_region;
        operation.bytes = bytes;
        operation.signal = signals_region;
        operation.signal_op = abi::kSignalInc;
        return operation;
    }
};

inline bool names(const std::string& one, const std::string& other = "?") {
    const std::string said = logged();
    const bool found = said.find(one) != std::string::npos || said.find(other) != std::string::npos;
    if (!found) std::fprintf(stderr, "wanted %s or %s, got: %s\n", one.c_str(), other.c_str(), said.c_str());
    return found;
}
