// From addresses and offsets to pointers.
#pragma once
#include "../protocol/args.h"

namespace moecomm::host {

template <class T>
T* memory(u64 address) {
    return reinterpret_cast<T*>(address);
}
// What lies `offset` bytes into the window of `rank`.
template <class T>
T* at(const Context& ctx, i32 rank, u64 offset) {
    return reinterpret_cast<T*>(ctx.peers[rank] + offset);
}

}  // namespace moecomm::host
