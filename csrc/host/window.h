// Pointers from addresses and window offsets.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

template <class T>
T* memory(u64 address) {
    return reinterpret_cast<T*>(address);
}
// Pointer to byte `offset` of the window of `rank`.
template <class T>
T* at(const Context& ctx, i32 rank, u64 offset) {
    return reinterpret_cast<T*>(window_of(ctx, rank) + offset);
}

}  // namespace moecomm::host
