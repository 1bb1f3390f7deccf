// NCCL's own logger: what the plugin has to say stands among NCCL's lines, under the same NCCL_DEBUG.
#pragma once
#include <string>

#include "nccl_abi.h"

namespace moecomm::rma {

void set_logger(abi::Logger logger);
void warn(const std::string& text);
void inform(const std::string& text);

}  // namespace moecomm::rma
