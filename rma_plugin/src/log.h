// Messages through NCCL's logger, subject to NCCL_DEBUG.
#pragma once
#include <string>

#include "nccl_abi.h"

namespace moecomm::rma {

void set_logger(abi::Logger logger);
void warn(const std::string& text);
void inform(const std::string& text);

}  // namespace moecomm::rma
