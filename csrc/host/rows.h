// What happens to the numbers of a row.  Every result is defined to the bit: products and sums are rounded to fp32 one by one (compiled
// with -ffp-contract=off), casts round to nearest even, a NaN that is cast to 16 bits becomes 0x7fff as on a GPU.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

constexpr i64 bytes_of(Type type) { return type == Type::fp32 ? 4 : type == Type::e4m3 ? 1 : 2; }

// sum[i] = sum[i] + factor * row[i], for n values of `type` (bf16, fp16, fp32).
void add_scaled(float* sum, const u8* row, Type type, i64 n, float factor);
// row[i] = sum[i] rounded to `type` (bf16, fp16, fp32).
void round_row(u8* row, const float* sum, Type type, i64 n);
// out[i] = e4m3(row[i] * ((1 / amax) * 448)), scales[g] = amax / 448, with amax = max(max |row[i]|, 1e-4) over group g of kQuantGroup values.
void quantize_row(u8* out, float* scales, const u8* row, Type type, i64 n);

}  // namespace moecomm::host
