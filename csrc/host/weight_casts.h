// Casts of weights in the memory of CPU ranks.  They leave the bits of moecomm/base/formats.py and of moecomm.fused.quantize_weights.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

enum class RowFormat { fp8_token, int8_token, int8_group, mxfp8, nvfp4, mxfp4 };

// Cast `count` rows of bf16, fp16 or fp32.  Rows, values and scales are contiguous, as the format has them.  `global_scale`: of nvfp4.
void cast_rows(u8* values, u8* scales, RowFormat format, const u8* rows, Type type, i64 count, i64 columns, float global_scale);

// Cast a matrix to e4m3 with a scale for each block of 128 x 128; those at the lower and right edges may be smaller.
void cast_blocks(u8* values, float* scales, const u8* rows, Type type, i64 count, i64 columns);

}  // namespace moecomm::host
