// What rounds ask of a tensor that they are given.
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

// The same, and aligned as bulk copies need it.
inline bool is_rows(const DLTensor& t, i64 rows, i64 columns) {
    return is_matrix(t, rows, columns) &&
           (is_empty(t) || (pitch_of(t) % kRowAlignment == 0 && address_of(t) % static_cast<u64>(kRowAlignment) == 0));
}

// The rows of [rows][columns] have memory of their own, as what is written must.
inline bool rows_apart(const DLTensor& t) { return t.shape[0] < 2 || pitch_of(t) >= t.shape[1] * element_bytes(t); }

// Whether all of a tensor that has strides, none of them negative, lies in `bytes` bytes from `begin` on.
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

// Behind the last byte of a tensor that has elements, and strides of which none is negative.
inline u64 end_of(const DLTensor& t) {
    u64 last = address_of(t);
    for (i32 d = 0; d < t.ndim; ++d) last += static_cast<u64>((t.shape[d] - 1) * t.strides[d] * element_bytes(t));
    return last + static_cast<u64>(element_bytes(t));
}

// Whether two tensors that have strides may have bytes in common: matrices with contiguous rows, as many bytes apart, can lie side by side.
inline bool share_memory(const DLTensor& a, const DLTensor& b) {
    if (is_empty(a) || is_empty(b)) return false;
    if (end_of(a) <= address_of(b) || end_of(b) <= address_of(a)) return false;
    const auto width = [](const DLTensor& t) { return static_cast<u64>(t.shape[t.ndim - 1] * element_bytes(t)); };
    const u64 pitch = static_cast<u64>(pitch_of(a));
    const auto is_wide = [](const DLTensor& t) { return t.ndim == 2 && (t.shape[1] == 1 || t.strides[1] == 1); };
    if (!is_wide(a) || !is_wide(b) || pitch == 0 || pitch != static_cast<u64>(pitch_of(b))) return true;
    const u64 apart = (address_of(b) % pitch + pitch - address_of(a) % pitch) % pitch;  // side by side in wider rows?
    return apart < width(a) || apart + width(b) > pitch;
}

inline bool is_packed(const DLTensor& t, i64 rows, i64 columns) { return is_matrix(t, rows, columns) && is_contiguous(t); }

// Of what elements a tensor is, and where; or that none is given.
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
