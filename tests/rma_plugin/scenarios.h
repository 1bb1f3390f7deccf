// The tests: what each rank does, and what must come of it.  `options.variant` is what follows the scenario's name and a dash.
#pragma once
#include "proxy.h"

using Scenario = bool(const Options& options, World& world, int rank);
Scenario random_case;                                             // random_case.cpp
Scenario killed, silent, absent, elsewhere, left, again, misuse;  // failure_cases.cpp
Scenario strangers, no_descriptors, no_descriptor_for_window;     // door_cases.cpp
Scenario crowded, half_registered, late_signal, copied_into;      // waiting_cases.cpp
Scenario liar;                                                    // liar_case.cpp

constexpr uint64_t kWindowBytes = 1 << 20;
constexpr auto kLong = std::chrono::seconds(20);
constexpr double kBlocked = 0.5;  // seconds; the timeouts of these tests are longer

// A rank that is connected, with a window and signals registered.
struct Open {
    Proxy proxy;
    char* window = nullptr;
    void *window_region = nullptr, *signals_region = nullptr;

    Open(const Options& options, World& world, int rank) : proxy(options, world, rank) {
        proxy.listen();
        require(proxy.connect() == abi::kSuccess, "connect: " + logged());
        proxy.open_contexts();
        window = allocate_window(kWindowBytes);
        window_region = proxy.add(window, kWindowBytes);
        signals_region = proxy.add(allocate_signals(4096), 4096, 1 | abi::kSignalNeverReset);
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
