// Argument struct of copy_rows.cuh, for its launch as well.
#pragma once
#include "args.h"

namespace moecomm {

struct CopyRowsArgs {
    PaddingArgs of;  // which rows are empty, and the rows themselves
    u64 to;          // as many rows, contiguous
};

}  // namespace moecomm
