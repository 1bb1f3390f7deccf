#include "log.h"

#include <atomic>

namespace moecomm::rma {
namespace {

std::atomic<abi::Logger> current{nullptr};

void say(int level, const std::string& text) {
    if (const abi::Logger logger = current.load(std::memory_order_acquire)) {
        logger(level, abi::kLogNet, "moecomm-rma", 0, "moecomm-rma: %s", text.c_str());
    }
}

}  // namespace

void set_logger(abi::Logger logger) { current.store(logger, std::memory_order_release); }
void warn(const std::string& text) { say(abi::kLogWarn, text); }
void inform(const std::string& text) { say(abi::kLogInfo, text); }

}  // namespace moecomm::rma
