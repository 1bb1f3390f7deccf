// One operation that NCCL asked for, until it has been told that it is done.
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

    std::shared_ptr<Region> signal;  // to be raised when the bytes are there; null: none
    uint64_t signal_at = 0, signal_value = 0;

    uint64_t gets_before = 0;  // kFlush: this many gets must have ended

    bool moved = false;      // the bytes are where they belong
    bool signalled = false;  // the signal is on its way, behind them
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
    Ticket ticket = 0;      // of the last of them
    int held = 0;           // queues of ours that point here
    bool released = false;  // NCCL has forgotten it
    times::Mark mark;
};

}  // namespace moecomm::rma
