// Arithmetic on rows.  Every result is defined to the bit: products and sums are rounded to fp32 one by one (compiled with
// -ffp-contract=off), casts round to nearest even, and a NaN cast to 16 bits becomes 0x7fff as on a GPU.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

constexpr i64 bytes_of(Type type) { return type == Type::fp32 ? 4 : has_scales(type) ? 1 : 2; }

// Copy a row.  `past_cache` uses non-temporal stores, which do not first load the target's cache lines: a large round, whose rows leave
// the cache before they are used anyway, takes a quarter less time.
void copy_row(u8* to, const u8* from, i64 bytes, bool past_cache);
constexpr i64 kPastCache = 256 << 10;  // a rank's rows of at least this many bytes make a round large
// Fence for non-temporal stores, which a release store does not order: call before signaling copied rows.
void order_copied_rows();

// Rows to sum in this order, each times its factor; `count` may be 0.
struct Addends {
    const u8* row[kMaxHostRanks];
    float factor[kMaxHostRanks];
    Type type[kMaxHostRanks];  // bf16, fp16, fp32
    i32 count = 0;

    void add(const u8* r, Type t, float f) {
        row[count] = r;
        type[count] = t;
        factor[count++] = f;
    }
};
static_assert(kMaxHostRanks > kMaxTopk, "a token has a row an expert at most, and a bias");
// sum[i] = ((0 + factor[0] * row[0][first + i]) + factor[1] * row[1][first + i]) + ..., for i < n.
void sum_rows(float* sum, const Addends& rows, i64 first, i64 n);
// sum[i] = sum[i] + factor * row[i].
void add_row(float* sum, const u8* row, Type type, float factor, i64 n);
// row[i] = sum[i] rounded to `type` (bf16, fp16, fp32).
void round_row(u8* row, const float* sum, Type type, i64 n);
// Round the columns [first, first + n) of a row of `hidden` to a staged row of `type` (staged_bytes); `sum` has them alone. `first` is a
// multiple of kScaledColumns, and the last call of a row ends at `hidden`. stage_scaled: to a type with scales, columns of a row of `from`.
void stage_scaled(u8* staged, Type type, const u8* columns, Type from, i64 hidden, i64 first, i64 n);
void stage_columns(u8* staged, const float* sum, Type type, i64 hidden, i64 first, i64 n);
// sum[i] = sum[i] + factor * (column first + i of a staged row), for i < n; a type with scales: the factor is 1, and a value is
// multiplied by its scale.
void add_staged(float* sum, const u8* staged, Type type, float factor, i64 hidden, i64 first, i64 n);
// Quantize each group of kQuantGroup values with its own scale, from amax = max(max |row[i]|, 1e-4) over the group:
//   fp32:   scales[g] = amax / 448, out[i] = e4m3(row[i] * ((1 / amax) * 448))
//   ue8m0:  scales[g] = exponent of p, the smallest power of two >= amax / 448, out[i] = e4m3(row[i] / p)
void quantize_row(u8* out, u8* scales, ScaleFormat format, const u8* row, Type type, i64 n);

}  // namespace moecomm::host
