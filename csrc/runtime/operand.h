// Layout and overlap checks of tensors passed to rounds.
#pragma once
#include "dlpack.h"

namespace moecomm::runtime {

constexpr i64 kRowAlignment = 16;  // bytes: of the first row, and from row to row

inline u64 address_of(const DLTensor& t) { return reinterpret_cast<u64>(t.data) + t.byte_offset; }
inline i64 element_bytes(const DLTensor& t) { return t.dtype.bits / 8; }

inline bool is_empty(const DLTensor& t) {
    for (i32 d = 0; d < t.ndim; ++d)
        if (t.shape[d] == 0) return true;
    return false;
}

inline bool is_contiguous(const DLTensor& t) {
    if (t.strides == nullptr || is_empty(t)) return true;
    i64 step = 1;
    for (i32 d = t.ndim; d-- > 0;) {
        if (t.shape[d] != 1 && t.strides[d] != step) return false;
        step *= t.shape[d];
    }
    return true;
}

// Bytes from row to row of [rows][columns].
inline i64 pitch_of(const DLTensor& t) { return (t.strides == nullptr || is_empty(t) ? t.shape[1] : t.strides[0]) * element_bytes(t); }

// [rows][columns], where every row is contiguous.
inline bool is_matrix(const DLTensor& t, i64 rows, i64 columns) {
    if (t.ndim != 2 || t.shape[0] != rows || t.shape[1] != columns) return false;
    return columns == 1 || is_empty(t) || t.strides == nullptr || t.strides[1] == 1;
}

// A matrix whose first row and pitch have the alignment of bulk copies.
inline bool is_rows(const DLTensor& t, i64 rows, i64 columns) {
    return is_matrix(t, rows, columns) &&
           (is_empty(t) || (pitch_of(t) % kRowAlignment == 0 && address_of(t) % static_cast<u64>(kRowAlignment) == 0));
}

// True if the rows of [rows][columns] do not overlap, as outputs require.
inline bool rows_apart(const DLTensor& t) { return t.shape[0] < 2 || pitch_of(t) >= t.shape[1] * element_bytes(t); }

// True if a tensor with explicit, non-negative strides is within [begin, begin + bytes).
inline bool is_inside(const DLTensor& t, u64 begin, u64 bytes) {
    if (is_empty(t)) return true;
    u64 end = address_of(t) - begin + static_cast<u64>(element_bytes(t));
    bool overflow = address_of(t) < begin;
    for (i32 d = 0; d < t.ndim; ++d) {
        u64 span = 0;
        overflow |= __builtin_mul_overflow(static_cast<u64>(t.shape[d] - 1), static_cast<u64>(t.strides[d] * element_bytes(t)), &span);
        overflow |= __builtin_add_overflow(end, span, &end);
    }
    return !overflow && end <= bytes;
}

// Address past the last byte of a non-empty tensor with explicit, non-negative strides.
inline u64 end_of(const DLTensor& t) {
    u64 last = address_of(t);
    for (i32 d = 0; d < t.ndim; ++d) last += static_cast<u64>((t.shape[d] - 1) * t.strides[d] * element_bytes(t));
    return last + static_cast<u64>(element_bytes(t));
}

// True if two tensors with explicit strides may share bytes.  Matrices with contiguous rows and equal pitches may be side by side.
inline bool share_memory(const DLTensor& a, const DLTensor& b) {
    if (is_empty(a) || is_empty(b)) return false;
    if (end_of(a) <= address_of(b) || end_of(b) <= address_of(a)) return false;
    const auto width = [](const DLTensor& t) { return static_cast<u64>(t.shape[t.ndim - 1] * element_bytes(t)); };
    const u64 pitch = static_cast<u64>(pitch_of(a));
    const auto is_wide = [](const DLTensor& t) { return t.ndim == 2 && (t.shape[1] == 1 || t.strides[1] == 1); };
    if (!is_wide(a) || !is_wide(b) || pitch == 0 || pitch != static_cast<u64>(pitch_of(b))) return true;
    const u64 apart = (address_of(b) % pitch + pitch - address_of(a) % pitch) % pitch;  // distance of the columns within a row
    return apart < width(a) || apart + width(b) > pitch;
}

inline bool is_packed(const DLTensor& t, i64 rows, i64 columns) { return is_matrix(t, rows, columns) && is_contiguous(t); }

// Dtype and device of an optional tensor argument.
class Operand {
  public:
    explicit Operand(const DLTensor* like) : given_(like != nullptr) {
        if (!given_) return;
        type_ = like->dtype;
        device_ = like->device;
    }

    bool fits(const DLTensor* t) const {
        if (t == nullptr || !given_) return (t != nullptr) == given_;
        return t->dtype.code == type_.code && t->dtype.bits == type_.bits && t->dtype.lanes == type_.lanes &&
               t->device.device_type == device_.device_type && t->device.device_id == device_.device_id;
    }

    const DLDataType& type() const { return type_; }
    const DLDevice& device() const { return device_; }

  private:
    bool given_;
    DLDataType type_{};
    DLDevice device_{};
};

}  // namespace moecomm::runtime
