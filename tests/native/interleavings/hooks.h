// Included before every unit of the host executor: each atomic access of csrc/protocol/order.h first lets other ranks go.
#pragma once
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moecomm::test {

enum class Access { begin, load, store, compare_exchange, add, poll_again };

// Called by a rank that is about to access a word, of 4 or 8 bytes.  Returns when it is its turn.
void arrive(Access access, const void* word, unsigned bytes, unsigned long long value = 0, unsigned long long expected = 0);

template <int Order, class T>
T load(const T* p) {
    arrive(Access::load, p, sizeof(T));
    return __atomic_load_n(p, Order);
}
template <int Order, class T, class V>
void store(T* p, V v) {
    arrive(Access::store, p, sizeof(T), static_cast<T>(v));
    __atomic_store_n(p, static_cast<T>(v), Order);
}
template <int Order, class T>
bool compare_exchange(T* p, T* expected, T v) {
    arrive(Access::compare_exchange, p, sizeof(T), v, *expected);
    return __atomic_compare_exchange_n(p, expected, v, false, Order, Order);
}
template <int Order, class T, class V>
T add(T* p, V v) {
    arrive(Access::add, p, sizeof(T), static_cast<T>(v));
    return __atomic_fetch_add(p, static_cast<T>(v), Order);
}

}  // namespace moecomm::test

#define __atomic_load_n(p, order) ::moecomm::test::load<order>(p)
#define __atomic_store_n(p, v, order) ::moecomm::test::store<order>(p, v)
#define __atomic_compare_exchange_n(p, expected, v, weak, order, failure) ::moecomm::test::compare_exchange<order>(p, expected, v)
#define __atomic_fetch_add(p, v, order) ::moecomm::test::add<order>(p, v)
