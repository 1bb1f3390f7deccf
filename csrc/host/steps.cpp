#include "steps.h"

#include <atomic>
#include <unordered_map>

namespace moecomm::host {

namespace {

std::mutex registry;
std::unordered_map<u64, std::shared_ptr<StepLog>> logs;  // by address of the failure record
std::atomic<u32> traced{0};                              // logs.size(), for a look without the mutex

}  // namespace

void StepLog::add(const Step& step) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (steps_.size() < kMost)
        steps_.push_back(step);
    else
        ++dropped_;
}

StepLog::Taken StepLog::take() {
    Taken taken{};
    std::lock_guard<std::mutex> lock(mutex_);
    taken.steps.swap(steps_);
    std::swap(taken.dropped, dropped_);
    return taken;
}

void trace_rounds(u64 record, bool on) {
    std::lock_guard<std::mutex> lock(registry);
    if (on)
        logs.try_emplace(record, std::make_shared<StepLog>());
    else
        logs.erase(record);
    traced.store(static_cast<u32>(logs.size()), std::memory_order_relaxed);
}

std::shared_ptr<StepLog> steps_of(u64 record) {
    if (traced.load(std::memory_order_relaxed) == 0) return nullptr;
    std::lock_guard<std::mutex> lock(registry);
    const auto found = logs.find(record);
    return found == logs.end() ? nullptr : found->second;
}

i32& this_worker() {
    thread_local i32 worker = 0;
    return worker;
}

const char* name_of(Phase phase) {
    switch (phase) {
        case Phase::header:
            return "header";
        case Phase::payload:
            return "payload";
        case Phase::reduced:
            return "reduced";
        case Phase::drained:
            return "drained";
        default:
            return "grid";
    }
}

}  // namespace moecomm::host
