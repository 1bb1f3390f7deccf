#include "ping_pong.h"

#include <cstring>

namespace moecomm::host {
namespace {

void put(const PingPong& p, u64 count) {
    std::memcpy(reinterpret_cast<void*>(p.there + kPayload), reinterpret_cast<const void*>(p.source), static_cast<std::size_t>(p.bytes));
    store_release(reinterpret_cast<u64*>(p.there), count);
}

bool await_peer(const PingPong& p, u64 count) {
    return wait_until(p.deadline, [&] { return load_acquire(reinterpret_cast<const u64*>(p.here)) >= count; }) == Waited::ok;
}

}  // namespace

std::optional<u64> ping_pong(const PingPong& p) {
    u64 start = now_ns();
    for (i32 round = 0; round < p.warmup + p.rounds; ++round) {
        if (round == p.warmup) start = now_ns();
        const u64 count = p.before + static_cast<u64>(round) + 1;
        if (!p.starts && !await_peer(p, count)) return std::nullopt;
        put(p, count);
        if (p.starts && !await_peer(p, count)) return std::nullopt;
    }
    return now_ns() - start;
}

}  // namespace moecomm::host
