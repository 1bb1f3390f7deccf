#include "during_waits.h"

#include <utility>

#include "../protocol/deadline.h"

namespace moecomm::host {

namespace {

thread_local DuringWaits* current = nullptr;

}  // namespace

DuringWaits::DuringWaits(std::function<void()> look) : look_(std::move(look)), outer_(std::exchange(current, this)) {}

DuringWaits::~DuringWaits() { current = outer_; }

bool DuringWaits::any() { return current != nullptr; }

void DuringWaits::look() {
    DuringWaits* const mine = current;
    if (mine == nullptr) return;
    const u64 now = now_ns();
    if (mine->last_ns_ == 0) mine->last_ns_ = now;
    if (now - mine->last_ns_ < kLookNs) return;
    mine->look_();
    mine->last_ns_ = now_ns();
}

}  // namespace moecomm::host
