// Threads of a block of the kernels in elementwise/, for their launches as well.
#pragma once
#include "../protocol/compiler.h"

namespace moecomm {

constexpr i32 kPassThreads = 256;

}  // namespace moecomm
