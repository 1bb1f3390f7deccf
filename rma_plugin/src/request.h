// One operation of NCCL's, until NCCL has learned that it is done.
#pragma once
#include <memory>

#include "copies.h"
#include "region.h"
#include "times.h"

namespace moecomm::rma {

struct Request {
    enum class Kind { kPut, kGet, kFlush };

    Kind kind = Kind::kPut;
    int peer = 0;
    std::shared_ptr<Region> local, remote;
    uint64_t local_at = 0, remote_at = 0, bytes = 0;

    std::shared_ptr<Region> signal;  // to signal once the bytes are in place; null: none
    uint64_t signal_at = 0, signal_value = 0;

    uint64_t gets_before = 0;  // kFlush: number of gets that must have ended

    bool moved = false;      // the bytes are in place
    bool signalled = false;  // the signal is under way
    bool done() const { return moved && (signal == nullptr || signalled); }
    void has_moved() {
        moved = true;
        if (mark.open != nullptr && done()) mark.end();
    }
    void has_signalled() {
        signalled = true;
        if (mark.open != nullptr && done()) mark.end();
    }

    uint64_t started = 0;   // bytes whose copy has begun
    Ticket ticket = 0;      // of the last copy
    int held = 0;           // number of the plugin's queues that point here
    bool released = false;  // NCCL no longer refers to it
    times::Mark mark;
};

}  // namespace moecomm::rma
