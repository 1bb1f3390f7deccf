// What happens to the numbers of a row.  Every result is defined to the bit: products and sums are rounded to fp32 one by one (compiled
// with -ffp-contract=off), casts round to nearest even, a NaN that is cast to 16 bits becomes 0x7fff as on a GPU.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

constexpr i64 bytes_of(Type type) { return type == Type::fp32 ? 4 : type == Type::e4m3 ? 1 : 2; }

// Copies a row.  Past the cache, it need not first read what the memory held: that takes a quarter off the time of a large round, whose
// rows would not stay in the cache until they are used anyway.
void copy_row(u8* to, const u8* from, i64 bytes, bool past_cache);
constexpr i64 kPastCache = 256 << 10;  // bytes of a rank's tokens from which rounds are large
// A store with release does not order what went past the cache: call this before the flag of copied rows is set.
void order_copied_rows();

// Rows to be added up, in this order, each times its factor; `count` may be 0.
struct Addends {
    const u8* row[kMaxRanks];
    float factor[kMaxRanks];
    i32 count = 0;
    Type type;  // bf16, fp16, fp32

    void add(const u8* r, float f) {
        row[count] = r;
        factor[count++] = f;
    }
};
static_assert(kMaxRanks >= kMaxTopk, "a token has a row a rank, or a row an expert");
// sum[i] = ((0 + factor[0] * row[0][i]) + factor[1] * row[1][i]) + ..., for the n columns from `first` on; sum[0] is that of `first`.
void sum_rows(float* sum, const Addends& rows, i64 first, i64 n);
// sum[i] = sum[i] + row[i].
void add_row(float* sum, const u8* row, Type type, i64 n);
// row[i] = sum[i] rounded to `type` (bf16, fp16, fp32).
void round_row(u8* row, const float* sum, Type type, i64 n);
// Each group of kQuantGroup values with a scale of its own, from amax = max(max |row[i]|, 1e-4) over the group:
//   fp32:   scales[g] = amax / 448, out[i] = e4m3(row[i] * ((1 / amax) * 448))
//   ue8m0:  scales[g] = the exponent of the smallest power of two that is at least amax / 448, out[i] = e4m3(row[i] / that power)
void quantize_row(u8* out, u8* scales, ScaleFormat format, const u8* row, Type type, i64 n);

}  // namespace moecomm::host
