#include "settings.h"

#include <cstdlib>

#include "failure.h"

namespace moecomm::rma {
namespace {

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

}  // namespace

Settings read_settings() {
    Settings settings;
    settings.job = variable("MOECOMM_RMA_JOB");
    const std::string timeout = variable("MOECOMM_RMA_TIMEOUT_MS");
    if (!timeout.empty()) {
        char* end = nullptr;
        const long value = std::strtol(timeout.c_str(), &end, 10);
        if (*end != 0 || value < 1 || value > 24L * 3600 * 1000) {
            throw Failure(Fault::kUnsupported, "MOECOMM_RMA_TIMEOUT_MS=" + timeout + ": want 1 to 86400000");
        }
        settings.timeout = std::chrono::milliseconds(value);
    }
    const std::string times = variable("MOECOMM_RMA_TIMES");
    if (!times.empty() && times != "0" && times != "1") throw Failure(Fault::kUnsupported, "MOECOMM_RMA_TIMES=" + times + ": want 0 or 1");
    settings.times = times == "1";
    return settings;
}

}  // namespace moecomm::rma
